// How much of the model's context a conversation fills: as the server reports it where it does, else as it counts or, with
// a "~", as far as can be guessed here.

import { post } from "./api.js";
import { count } from "./format.js";
import { messages, path, upTo } from "./conversation.js";
import { toolsIn } from "./answer.js";

const PAUSE = 300; // milliseconds in which nothing else changes before the server is asked to count
const LETTERS = 4; // characters of a token, about
const MOST = 200; // counts that are remembered

const usageOf = (node) => (Number.isFinite(node?.meta?.prompt) ? node.meta.prompt + (node.meta.generated ?? 0) : null);
const guess = (node) => Math.ceil((node.content.length + (node.attachments ?? []).reduce((n, f) => n + (f.text?.length ?? 0), 0)
  + (node.calls ?? []).reduce((n, c) => n + c.arguments.length, 0)) / LETTERS) + 4;

export class ContextMeter {
  /** `changed` is called when a count has come. */
  constructor(gauge, label, changed) {
    Object.assign(this, { gauge, label, changed });
    this.counts = new Map(); // what was counted → its tokens; null where that failed
    this.bases = new Map(); // answer → the settings that its usage is for
    this.timer = 0;
  }

  /** `model` is the card of the chosen one, `answer` the one that is being made, `draft` the characters not sent yet. */
  show({ talk, model, answer, draft }) {
    const window = model?.context_window ?? 0;
    const { tokens, exact } = this.used(talk, model, answer);
    const total = tokens + Math.ceil(draft / LETTERS);
    this.gauge.show(window ? total / window : 0);
    this.label.textContent = window ? `${exact && !draft ? "" : "~"}${count(total)} of ${count(window)}` : "";
  }

  used(talk, model, answer) {
    clearTimeout(this.timer);
    const basis = basisOf(talk, model);
    if (answer) {
      this.bases.set(answer.node.id, basis);
      const usage = usageOf(answer.node);
      if (usage !== null) return { tokens: usage, exact: true };
    }
    let leaf = answer?.node ?? path(talk).at(-1);
    while (leaf && isEmpty(leaf)) leaf = talk.nodes[leaf.parent]; // an answer that failed at once: its question is what fills the context
    if (!leaf) return { tokens: 0, exact: true };
    if (usageOf(leaf) !== null && !this.bases.has(leaf.id)) this.bases.set(leaf.id, basis);
    if (usageOf(leaf) !== null && this.bases.get(leaf.id) === basis && madeBy(leaf, model)) return { tokens: usageOf(leaf), exact: true };
    const key = `${basis}\n${leaf.id}`, counted = this.counts.get(key);
    if (Number.isFinite(counted)) return { tokens: counted, exact: true };
    if (counted === undefined && !answer && model?.state === "loaded") this.timer = setTimeout(() => this.ask(key, talk, leaf, model), PAUSE);
    return { tokens: guessed(talk, leaf), exact: false };
  }

  async ask(key, talk, leaf, model) {
    const { settings } = talk;
    if (this.counts.size >= MOST) this.counts.clear();
    this.counts.set(key, null);
    try {
      const body = { model: model.id, messages: messages(talk, leaf.id), add_generation_prompt: leaf.role !== "assistant" };
      if (settings.tools?.trim()) body.tools = toolsIn(settings.tools);
      if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
      this.counts.set(key, (await post("/tokenize", body)).count);
      this.changed();
    } catch { /* the guess stays */ }
  }
}

const isEmpty = (node) => node.role === "assistant" && usageOf(node) === null && !node.content && !node.reasoning && !node.calls?.length;
const basisOf = ({ settings }, model) => JSON.stringify([model?.id, settings.system ?? "", settings.tools ?? "", settings.thinking ?? ""]);
const madeBy = (node, model) => !model || !node.meta.model || [model.id, model.alias_of].includes(node.meta.model);

/** From the last usage that was reported above a message on, by the length of the texts. */
function guessed(talk, leaf) {
  const nodes = upTo(talk, leaf.id), from = nodes.findLastIndex((n) => usageOf(n) !== null);
  const known = from < 0 ? guess({ content: talk.settings.system ?? "" }) : usageOf(nodes[from]);
  return nodes.slice(from + 1).reduce((sum, node) => sum + guess(node), known);
}
