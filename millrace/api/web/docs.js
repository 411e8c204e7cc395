// The API as a page: every endpoint with its fields, and requests that can be sent as they stand.

import { key } from "./api.js";
import { button, copied, el, replace, sign } from "./dom.js";

const MOST_SHOWN = 200_000; // characters of an answer
const SIGNS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "length ≥", maxLength: "length ≤" };
const TITLES = { openai: "OpenAI", anthropic: "Anthropic", responses: "OpenAI Responses", conversations: "OpenAI Conversations", sglang: "SGLang", ollama: "Ollama", server: "The server" };
const KINDS = { MODEL: "text", EMBEDDER: "embeddings", RANKER: "scores" }; // names in examples, and what such models make
let schemas = {}, models = {};

const named = (ref) => ref.split("/").pop();

function typeOf(s) {
  if (!s || s === true) return "anything";
  if (s.$ref) return named(s.$ref);
  if (s.const !== undefined) return JSON.stringify(s.const);
  if (s.enum) return s.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (s.anyOf) return s.anyOf.map(typeOf).filter((t) => t !== "null").join(" | ");
  if (s.type === "array") return `list of ${typeOf(s.items)}`;
  if (s.type === "object" && s.additionalProperties) return `map of ${typeOf(s.additionalProperties)}`;
  const bounds = Object.entries(SIGNS).filter(([k]) => s[k] !== undefined).map(([k, text]) => `${text} ${s[k]}`).join(", ");
  return (s.type || "anything") + (bounds ? ` (${bounds})` : "");
}

function refsIn(s, found = new Set()) {
  if (s && typeof s === "object") {
    if (s.$ref) found.add(named(s.$ref));
    for (const inner of Object.values(s)) refsIn(inner, found);
  }
  return found;
}

function fields(schema, depth = 0) {
  const s = schema?.$ref ? schemas[named(schema.$ref)] : schema ?? {};
  const box = el("div", { class: "schema" });
  if (s.description) box.append(el("p", { class: "dim", text: s.description }));
  if (!s.properties) box.append(el("p", { text: typeOf(s) }));
  else {
    const must = s.required ?? [], known = ["model", "messages", "input", "prompt", "max_tokens", "temperature", "stream"];
    const rank = ([name]) => (must.includes(name) ? 0 : known.includes(name) ? 1 : 2);
    box.append(el("dl", {}, ...Object.entries(s.properties).sort((a, b) => rank(a) - rank(b)).map(([name, field]) => el("div", {},
      el("dt", {}, el("code", { text: name }), must.includes(name) && el("span", { class: "pill", text: "required" }), el("span", { class: "dim", text: typeOf(field) })),
      field.description && el("dd", { text: field.description })))));
  }
  if (depth < 4) for (const ref of refsIn(s.properties ?? s.anyOf ?? s.items)) box.append(folded(ref, () => fields({ $ref: `/${ref}` }, depth + 1)));
  return box;
}

/** Made when it is opened, not before. */
function folded(title, make, summary = el("summary", { text: title })) {
  const box = el("details", {}, summary);
  box.addEventListener("toggle", () => box.childElementCount > 1 || box.append(make()));
  return box;
}

function attempt(path, method, operation) {
  const inputs = (operation.parameters ?? []).filter((p) => p.in !== "header").map((p) => {
    const known = `${p.in} ${p.name}` === "path name" || `${p.in} ${p.name}` === "query model" ? models.MODEL ?? "" : "";
    return [p, el("input", { value: known, placeholder: p.name, "aria-label": p.name, title: p.schema?.description ?? p.name })];
  });
  const content = operation.requestBody?.content["application/json"];
  const example = JSON.stringify(content?.example ?? {}, null, 2).replace(/"(MODEL|EMBEDDER|RANKER)"/g, (_, kind) => JSON.stringify(models[kind] ?? models.any ?? kind));
  const body = content && el("textarea", { rows: Math.min(14, example.split("\n").length + 1), value: example, class: "mono", "aria-label": "Body", spellcheck: "false" });
  const out = el("pre", { class: "log card", tabindex: "0", hidden: true, "aria-label": "Answer" });
  let control = null;
  const send = button("Send", async () => {
    if (control) { control.abort(); return; }
    control = new AbortController();
    send.textContent = "Stop";
    out.hidden = false;
    replace(out, "…");
    try { await sent(address(path, inputs), method, body?.value, out, control.signal); } catch (error) { if (!control.signal.aborted) out.append(`\n${error}`); }
    control = null;
    send.textContent = "Send";
  }, { class: "main" });
  const curl = sign("copy", "Copy as curl", () => copied(asCurl(address(path, inputs), method, body?.value), curl));
  return el("div", { class: "list" }, inputs.length > 0 && el("div", { class: "row" }, ...inputs.map(([, input]) => input)), body, el("div", { class: "row" }, send, curl), out);
}

function address(path, inputs) {
  const query = new URLSearchParams();
  let url = path;
  for (const [p, input] of inputs) {
    if (p.in === "path") url = url.replace(`{${p.name}}`, encodeURIComponent(input.value).replaceAll("%2F", "/"));
    else if (input.value) query.set(p.name, input.value);
  }
  return query.size ? `${url}?${query}` : url;
}

async function sent(url, method, body, out, signal) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const answer = await fetch(url, { method: method.toUpperCase(), headers, body, signal, credentials: "omit" });
  replace(out, `${answer.status} ${answer.headers.get("content-type") ?? ""}\n\n`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const whole = (answer.headers.get("content-type") ?? "").startsWith("application/json");
  let text = "";
  for (let part; !(part = await reader.read()).done;) {
    text += part.value;
    if (whole) continue;
    out.append(part.value);
    while (out.textContent.length > MOST_SHOWN) out.firstChild.remove();
    out.scrollTop = out.scrollHeight;
  }
  if (whole) {
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it came */ }
    out.append(text.slice(0, MOST_SHOWN));
  }
}

function asCurl(url, method, body) {
  const parts = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}'${location.origin}${url}'`];
  if (key.get()) parts.push(`-H "authorization: Bearer $MILLRACE_API_KEY"`);
  if (body !== undefined) parts.push("-H 'content-type: application/json'", `-d '${body.replaceAll("'", "'\\''")}'`);
  return parts.join(" \\\n  ");
}

function operationBox(path, method, operation) {
  const title = el("summary", {}, el("b", { class: method, text: method.toUpperCase() }), el("code", { text: path }), el("span", { class: "dim", text: operation.summary }));
  return folded("", () => {
    const content = operation.requestBody?.content["application/json"];
    const answers = Object.entries(operation.responses).map(([status, answer]) => {
      const kinds = Object.entries(answer.content ?? {});
      return folded(`${status} ${answer.description} ${kinds.map(([media]) => media).join(", ")}`, () => el("div", {}, ...kinds.map(([, kind]) => fields(kind["x-event-schema"] ?? kind.schema))));
    });
    return el("div", { class: "list" }, el("h3", { text: "Try" }), attempt(path, method, operation), content && el("h3", { text: "Body" }), content && fields(content.schema), el("h3", { text: "Answers" }), ...answers);
  }, title);
}

async function start() {
  const field = el("input", { type: "password", autocomplete: "off", placeholder: "API key, if there are any", "aria-label": "API key", value: key.get(), on: { change: () => { key.set(field.value.trim()); known(); } } });
  document.getElementById("tools").append(field);
  const described = await (await fetch("/openapi.json")).json();
  schemas = described.components.schemas;
  await known();
  const tags = new Map();
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      for (const tag of operation.tags) (tags.get(tag) ?? tags.set(tag, []).get(tag)).push(operationBox(path, method, operation));
    }
  }
  replace(document.querySelector(".page"), el("p", { class: "dim", text: `Version ${described.info.version}. ${described.info.description}` }),
    ...[...tags].map(([tag, boxes]) => el("section", { "aria-label": tag }, el("h2", { text: TITLES[tag] ?? tag }), ...boxes)));
  document.documentElement.dataset.ready = "";
}

/** A model for the examples, as far as one may look. */
async function known() {
  try {
    const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
    const { data } = await (await fetch("/v1/models", { headers })).json();
    const first = (fit) => (data.find((m) => fit(m) && m.state === "loaded") ?? data.find(fit))?.id;
    models = { any: first(() => true) };
    for (const [kind, made] of Object.entries(KINDS)) models[kind] = first((m) => m.output_modalities?.includes(made));
  } catch { /* without a key, the reader writes the model's name */ }
}

start();
