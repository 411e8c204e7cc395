// How other programs are pointed at this server: snippets with its real address and models.

import { key } from "./api.js";
import { copied, el, replace, sign, toast } from "./dom.js";
import { highlighter } from "./highlight.js";
import { likelyModel, modelNamed, refreshModels, server } from "./server.js";

/** A word as a shell takes it, whatever is in it. */
const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const quoted = (text) => JSON.stringify(text);
const plain = (text) => (/^[\w./-]+$/.test(text) ? text : quoted(text));

const SNIPPETS = {
  curl: ["bash", ({ base, model, secret }) => `curl ${base}/v1/chat/completions \\
  -H 'content-type: application/json'${secret ? ` \\\n  -H "authorization: Bearer $MILLRACE_API_KEY"` : ""} \\
  -d ${shell(`{"model": ${quoted(model)}, "messages": [{"role": "user", "content": "What is the capital of France?"}]}`)}`],
  "OpenAI Python": ["python", ({ base, model, secret }) => `${secret ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${secret ? 'os.environ["MILLRACE_API_KEY"]' : '"none"'})
stream = client.chat.completions.create(
    model=${quoted(model)},
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="")`],
  "OpenAI JavaScript": ["js", ({ base, model, secret }) => `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${base}/v1", apiKey: ${secret ? "process.env.MILLRACE_API_KEY" : '"none"'} });
const answer = await client.chat.completions.create({
  model: ${quoted(model)},
  messages: [{ role: "user", content: "What is the capital of France?" }],
});
console.log(answer.choices[0].message.content);`],
  "Anthropic Python": ["python", ({ base, model, secret }) => `${secret ? "import os\n\n" : ""}from anthropic import Anthropic

client = Anthropic(base_url="${base}", api_key=${secret ? 'os.environ["MILLRACE_API_KEY"]' : '"none"'})
answer = client.messages.create(
    model=${quoted(model)},
    max_tokens=1024,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
)
print(answer.content[0].text)`],
  "Ollama clients": ["bash", ({ base, model }) => `export OLLAMA_HOST=${base}
ollama run ${shell(model)} "What is the capital of France?"`],
  "Claude Code": ["bash", ({ base, model, secret, window }) => `export ANTHROPIC_BASE_URL=${base}
export ANTHROPIC_AUTH_TOKEN=${secret ? '"$MILLRACE_API_KEY"' : "none"}
export ANTHROPIC_MODEL=${shell(model)}
export ANTHROPIC_DEFAULT_HAIKU_MODEL=${shell(model)}
export ANTHROPIC_DEFAULT_SONNET_MODEL=${shell(model)}
export ANTHROPIC_DEFAULT_OPUS_MODEL=${shell(model)}${window ? `\nexport CLAUDE_CODE_MAX_CONTEXT_TOKENS=${window}` : ""}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude`],
  Codex: ["toml", ({ base, model }) => `# ~/.codex/config.toml
model = ${quoted(model)}
model_provider = "millrace"

[model_providers.millrace]
name = "millrace"
base_url = "${base}/v1"
wire_api = "responses"
env_key = "MILLRACE_API_KEY"    # any value, where the server has no keys`],
  OpenCode: ["json", ({ base, model, secret }) => `{
  "$schema": "https://opencode.ai/config.json",
  "model": ${quoted(`millrace/${model}`)},
  "provider": {
    "millrace": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "millrace",
      "options": { "baseURL": "${base}/v1"${secret ? ', "apiKey": "{env:MILLRACE_API_KEY}"' : ""} },
      "models": { ${quoted(model)}: {} }
    }
  }
}`],
  Continue: ["yaml", ({ base, model, secret }) => `# ~/.continue/config.yaml
models:
  - name: millrace
    provider: openai
    apiBase: ${base}/v1
    model: ${plain(model)}${secret ? "\n    apiKey: YOUR_KEY" : ""}`],
};
const ADDRESSES = [
  ["OpenAI", "/v1", "chat, completions, responses, embeddings"],
  ["Anthropic", "", "messages"],
  ["Ollama", "", "generate, chat, embed, tags"],
  ["API reference", "/docs", "every endpoint, with examples to run"],
  ["Metrics", "/metrics", "for Prometheus"],
];

export class Connect {
  constructor() {
    this.chosen = "curl";
    this.picker = el("select", { "aria-label": "Model", on: { change: () => this.show() } });
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Clients", on: { keydown: (e) => this.move(e) } });
    this.label = el("span");
    this.code = el("code");
    this.copy = sign("copy", "Copy", () => copied(this.code.textContent, this.copy));
    const panel = el("div", { class: "code", role: "tabpanel", id: "snippet" }, el("header", {}, this.label, this.copy), el("pre", { tabindex: "0" }, this.code));
    const base = location.origin;
    this.root = el("div", { class: "view" }, el("div", { class: "page" },
      el("section", { "aria-label": "Addresses" }, el("h2", { text: "Addresses" }), el("div", { class: "wide card", tabindex: "0" }, el("table", {}, el("tbody", {}, ...ADDRESSES.map(([name, path, what]) => {
        const copy = sign("copy", `Copy the address for ${name}`, () => copied(base + path, copy));
        return el("tr", {}, el("td", { text: name }), el("td", {}, el("code", { text: base + path })), el("td", { class: "dim roomy", text: what }), el("td", {}, copy));
      }))))),
      el("section", { "aria-label": "Snippets" }, el("div", { class: "lead" }, el("h2", { text: "Connect" }), this.picker), this.tabs, panel,
        el("p", { class: "dim" }, "Coding agents send prompts of 10,000 to 20,000 tokens: choose a model with a context of at least 32,000. ",
          el("code", { text: "millrace launch claude" }), ", ", el("code", { text: "codex" }), " or ", el("code", { text: "opencode" }), " sets all of this up for you."))));
  }

  async enter() {
    this.show();
    try { await refreshModels(); } catch (error) { if (error.status !== 401) toast(error.message, "bad"); }
    const before = this.picker.value;
    replace(this.picker, ...server.models.map((m) => el("option", { value: m.id, text: m.id })));
    this.picker.value = server.models.some((m) => m.id === before) ? before : likelyModel();
    this.show();
  }

  leave() {}
  key() { return false; }

  show() {
    replace(this.tabs, ...Object.keys(SNIPPETS).map((name) => el("button", {
      type: "button", role: "tab", text: name, "aria-selected": String(name === this.chosen), "aria-controls": "snippet", tabindex: name === this.chosen ? "0" : "-1",
      on: { click: () => { this.chosen = name; this.show(); } },
    })));
    const [lang, made] = SNIPPETS[this.chosen];
    const colour = highlighter(lang);
    const model = this.picker.value || "MODEL", window = modelNamed(model)?.context_window;
    const lines = made({ base: location.origin, model, window, secret: Boolean(key.get()) }).split("\n");
    this.label.textContent = this.chosen;
    replace(this.code, ...lines.flatMap((line, i) => [...(i ? ["\n"] : []), ...colour(line).map(([kind, text]) => (kind ? el("span", { class: kind, text }) : text))]));
  }

  move(event) {
    const names = Object.keys(SNIPPETS), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    this.chosen = names[(names.indexOf(this.chosen) + by + names.length) % names.length];
    this.show();
    this.tabs.querySelector('[aria-selected="true"]').focus();
  }
}
