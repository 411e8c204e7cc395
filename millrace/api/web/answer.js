// One answer: asked for, and taken in as it comes. It knows the wire and the message, and nothing of the page.

import { events, get, Refused } from "./api.js";
import { fresh, inRange, messages, NUMBERS } from "./conversation.js";
import { limitsOf } from "./limits.js";
import { modelNamed } from "./server.js";

export function requestOf(talk, parent, model) {
  const { settings } = talk;
  const body = { model: model || undefined, messages: messages(talk, parent), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of NUMBERS) if (inRange(name, settings[name])) body[name] = settings[name];
  Object.assign(body, limitsOf(settings, modelNamed(model)?.profile));
  if (settings.thinking === "on" || settings.thinking === "off") body.enable_thinking = settings.thinking === "on";
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.tools?.trim()) body.tools = toolsIn(settings.tools);
  return body;
}

/** The tools of a settings field; throws what is wrong with them. */
export function toolsIn(text) {
  let given;
  try { given = JSON.parse(text); } catch (error) { throw new Error(`Tools must be valid JSON: ${error.message}`); }
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

export class Answer {
  /** `model` gives the one to ask, when it is known; `changed` is called whenever there is more to show. */
  constructor(talk, node, model, changed) {
    Object.assign(this, { talk, node, model, changed, note: "Sending" });
    this.id = fresh("page-");
    this.control = new AbortController();
  }

  stop() {
    this.stopped = true;
    this.control.abort();
  }

  async run() {
    const { node } = this, began = performance.now();
    let first = null, last = began, whole = false;
    const watching = setInterval(() => first === null && this.look(), 700);
    try {
      node.meta = { model: await this.model() };
      const body = requestOf(this.talk, node.parent, node.meta.model);
      node.meta.limit = body.max_tokens;
      const options = { method: "POST", body, signal: this.control.signal, headers: { "x-request-id": this.id } };
      for await (const group of events("/v1/chat/completions", options)) {
        for (const { data } of group) {
          if (data === "[DONE]") { whole = true; continue; }
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Refused(0, chunk.error.message, chunk.error.code);
          if (this.take(chunk)) {
            last = performance.now();
            first ??= last;
          }
        }
        this.changed();
      }
      if (!whole) throw new Refused(0, "The connection was lost before the response was complete.");
    } catch (error) {
      if (this.stopped) node.meta.stopped = true;
      else node.meta.error = error.message || String(error);
    } finally {
      clearInterval(watching);
    }
    const { meta } = node;
    if (first !== null) {
      meta.ttft = (first - began) / 1000;
      if (meta.generated > 1 && last > first) meta.rate = ((meta.generated - 1) * 1000) / (last - first);
    }
    meta.seconds = (last - began) / 1000;
    this.over = true;
    this.changed();
  }

  /** Whether a piece of the answer was in it. */
  take(chunk) {
    const { node } = this;
    if (chunk.model) node.meta.model = chunk.model;
    if (chunk.usage) {
      node.meta.prompt = chunk.usage.prompt_tokens;
      node.meta.generated = chunk.usage.completion_tokens;
      node.meta.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    const choice = chunk.choices?.[0];
    if (!choice) return false;
    if (choice.finish_reason) node.meta.finish = choice.finish_reason;
    if (choice.finish_details?.type === "loop") node.meta.looped = true;
    const { delta } = choice;
    // A thought lasts from its first token to the first token of the answer or of a call.
    if (delta.reasoning_content) this.thoughtFrom ??= performance.now();
    if (this.thoughtFrom && !node.content && !node.calls?.length) node.meta.thought = (performance.now() - this.thoughtFrom) / 1000;
    if (delta.content) node.content += delta.content;
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) {
      const known = ((node.calls ??= [])[call.index] ??= { id: call.id, name: "", arguments: "" });
      if (call.function?.name) known.name = call.function.name;
      if (call.function?.arguments) known.arguments += call.function.arguments;
    }
    return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
  }

  /** Say what it waits for, when it waits long. */
  async look() {
    try {
      const { running } = await get("/v1/requests?limit=0");
      const own = running.find((r) => r.id === this.id);
      if (!own) this.note = "Loading the model";
      else if (own.phase === "queued") this.note = "Queued";
      else this.note = `Processing prompt, ${Math.round(own.progress * 100)} %`;
      this.changed();
    } catch { /* the answer itself will tell */ }
  }
}
