// The dashboard: what runs now, and charts of the last minutes.

import { get, follow, remove } from "./api.js";
import { button, confirmed, el, gauge, replace, toast } from "./dom.js";
import { bytes, clock, count, memoryText, percent, rate, seconds } from "./format.js";
import { Plot, spanOf } from "./plot.js";
import { connectionNotice, refreshRole, server, serverNow, watch } from "./server.js";

const WINDOW = 30; // seconds over which the share of cache hits is taken
const MOST_LINES = 400;

/** Of the prompt tokens of the last seconds, the percentage that was in the cache; null where there were none. */
function cacheHits(s, i) {
  let cached = 0, run = 0;
  for (let k = i; k >= 0 && s.time[k] > s.time[i] - WINDOW; k--) { cached += s.cached[k]; run += s.prefilled[k]; }
  return cached + run ? (100 * cached) / (cached + run) : null;
}

export class Dashboard {
  constructor() {
    const column = (name, field) => ({ name, value: (s, i) => s[field][i] });
    const tokens = (v) => (v === 0 ? "0" : rate(v));
    this.plots = [
      new Plot("Tokens per second", [column("generated", "generated"), column("prompt", "prefilled")], tokens, { unit: "tokens/s" }),
      new Plot("Requests", [column("running", "running"), column("queued", "waiting")], count, { unit: "requests", whole: true }),
      new Plot("KV cache memory", [column("running requests", "kv_bytes"), column("prefix cache", "cache_bytes")], bytes),
      new Plot("Cache hits", [{ name: "of prompt tokens", value: cacheHits }], (v) => (v === null ? "–" : `${Math.round(v)} %`), { top: 100 }),
    ];
    this.stats = el("div", { class: "stats" });
    this.running = el("div", { class: "list bounded", tabindex: "0", "aria-label": "Running requests" });
    this.engines = el("div", { class: "list" });
    this.ended = el("div", { class: "wide card", tabindex: "0" });
    this.log = el("pre", { class: "log card", tabindex: "0", "aria-label": "Log" });
    this.logging = button("Show log", () => this.toggleLog());
    this.connection = connectionNotice(() => this.root);
    this.span = el("h2", { text: "Last 10 minutes" });
    const section = (title, ...rest) => el("section", { "aria-label": title }, el("div", { class: "lead" }, el("h2", { text: title })), ...rest);
    this.log.hidden = true;
    this.refused = el("p", { class: "dim", role: "note", hidden: true });
    // The charts come before the lists: those grow and shrink with every request.
    this.root = el("div", { class: "view" }, el("div", { class: "page" }, this.connection, this.refused, this.stats,
      el("section", { "aria-label": "Charts" }, this.span, el("div", { class: "plots" }, ...this.plots.map((p) => p.root))),
      section("Running requests", this.running),
      section("Loaded models", this.engines),
      section("Recent requests", this.ended),
      section("Server log", el("div", { class: "row" }, this.logging), this.log)));
    this.rows = new Map();
    this.cards = new Map();
  }

  enter() {
    this.unwatch = watch(() => this.show());
    this.passing = setInterval(() => server.connected || this.show(), 1000); // without a server, time goes on in the charts
    refreshRole().then(() => this.showRole(), () => {}); // without an answer the server still refuses
  }

  /** What only administrators may do is switched off for others, with the reason. */
  showRole() {
    this.refused.hidden = !server.refused;
    this.refused.textContent = server.refused ? `Requests shown are those of your key. ${server.refused}` : "";
    for (const act of [this.logging, ...[...this.cards.values()].map((c) => c.empty)]) Object.assign(act, { disabled: Boolean(server.refused), title: server.refused ?? "" });
  }

  leave() {
    this.unwatch?.();
    clearInterval(this.passing);
    this.unlog?.();
    this.unlog = null;
    this.log.hidden = true;
    this.logging.textContent = "Show log";
  }

  key() { return false; }

  show() {
    this.connection.update();
    const { status, samples } = server;
    if (!status) return;
    const requests = status.models.flatMap((m) => m.requests.map((r) => ({ ...r, model: m.name })));
    const total = (name) => status.models.reduce((sum, m) => sum + m.totals[name], 0);
    const prompts = total("cached_tokens") + total("prefilled_tokens");
    replace(this.stats, ...[
      ["tokens/s", rate(samples?.generated.at(-1) ?? 0)],
      ["running requests", count(requests.length)],
      ["total requests", count(total("requests"))],
      ["tokens generated", count(total("generated_tokens"))],
      ["cache hits", percent(total("cached_tokens"), prompts)],
      [`memory in use, at most ${bytes(status.memory.reserved)}`, bytes(status.memory.weights + status.memory.kv_in_use)],
    ].map(([name, value]) => el("div", { class: "card stat" }, el("b", { text: value }), el("span", { class: "dim", text: name }))));
    this.showRunning(requests);
    this.showEngines(status.models);
    const now = serverNow(), minutes = Math.round(spanOf(samples?.time ?? [], now) / 60);
    this.span.textContent = minutes === 1 ? "Last minute" : `Last ${minutes} minutes`;
    for (const plot of this.plots) plot.show(samples, now);
    const ended = total("requests");
    if (ended !== this.known) { this.known = ended; this.showEnded(); }
  }

  showRunning(requests) {
    const seen = new Set();
    for (const request of requests.slice(0, 100)) {
      seen.add(request.id);
      const row = this.rows.get(request.id) ?? this.row(request.id);
      row.show(request);
    }
    for (const [id, row] of this.rows) if (!seen.has(id)) { row.root.remove(); this.rows.delete(id); }
    this.nothing ??= el("p", { class: "empty", text: "No requests are running. Requests from this page and from other clients appear here." });
    if (!requests.length) this.running.append(this.nothing); else this.nothing.remove();
  }

  row(id) {
    const facts = el("div", { class: "facts" }), bar = el("progress", { class: "whole", max: 1, "aria-label": "Prompt processed" });
    const phase = el("span", { class: "pill" });
    const cancel = button("Cancel", async () => {
      cancel.disabled = true;
      try { await remove(`/v1/requests/${encodeURIComponent(id)}`); } catch (error) { if (error.status !== 404) toast(error.message, "bad"); }
    }, { "aria-label": `Cancel ${id}` });
    const root = el("div", { class: "card item", data: { request: id } },
      el("div", {}, el("div", { class: "row" }, el("span", { class: "name mono", text: id }), phase), facts), el("div", { class: "row" }, cancel), bar);
    this.running.append(root);
    const show = (r) => {
      phase.textContent = { queued: "queued", prefill: "processing prompt", decode: "generating" }[r.phase];
      phase.className = `pill ${r.phase === "decode" ? "good" : ""}`;
      bar.value = r.progress;
      bar.hidden = r.phase === "decode";
      replace(facts, ...[
        r.model, r.endpoint, `${count(r.prompt_tokens)} prompt tokens${r.cached_tokens ? ` (${count(r.cached_tokens)} cached)` : ""}`,
        r.made_tokens ? `${count(r.made_tokens)} generated` : null, r.tokens_per_second ? `${rate(r.tokens_per_second)} tokens/s` : null,
        r.ttft_seconds ? `${seconds(r.ttft_seconds)} to first token` : null, seconds(r.age_seconds), r.resumes ? `resumed ${r.resumes}×` : null,
      ].filter(Boolean).map((text) => el("span", { text })));
    };
    const made = { root, show };
    this.rows.set(id, made);
    return made;
  }

  showEngines(models) {
    const seen = new Set(models.map((m) => m.name));
    for (const [name, card] of this.cards) if (!seen.has(name)) { card.root.remove(); this.cards.delete(name); }
    for (const model of models) (this.cards.get(model.name) ?? this.engine(model.name)).show(model);
    if (!models.length) replace(this.engines, el("p", { class: "empty", text: "No model is loaded. A model is loaded by the first request for it." }));
    else this.engines.querySelector(".empty")?.remove();
  }

  engine(name) {
    const facts = el("div", { class: "facts" }), tree = el("div", { class: "facts" }), dot = el("span", { class: "state" }), word = el("span", { class: "dim" });
    const kv = gauge("KV cache in use");
    const empty = button("Clear cache", async () => {
      if (!(await confirmed("Clear the prefix cache?", `The cached prompts of ${name} are deleted, in memory and on disk. Running requests are not affected.`, "Clear"))) return;
      try {
        const { dropped } = await remove(`/v1/cache?model=${encodeURIComponent(name)}`);
        toast(`${bytes(dropped[0].memory_bytes + dropped[0].disk_bytes)} cleared.`);
      } catch (error) { toast(error.message, "bad"); }
    });
    const root = el("div", { class: "card item" }, el("div", {}, el("div", { class: "row" }, dot, el("span", { class: "name", text: name }), word), facts, tree), el("div", { class: "row" }, empty), el("div", { class: "whole" }, kv));
    this.engines.append(root);
    const show = (m) => {
      dot.className = `state ${m.state}`;
      word.textContent = m.state === "ready" ? "ready" : `${m.state}: ${m.error ?? m.stage}`;
      kv.show(m.kv_budget ? m.kv_bytes / m.kv_budget : 0);
      const memory = m.device_memory;
      replace(facts, ...[
        m.device && `${m.device}, ${m.dtype}`, memoryText(m.memory), m.context_window && `context ${count(m.context_window)}`,
        m.kv_budget && `KV cache ${bytes(m.kv_bytes)} of ${bytes(m.kv_budget)}`, memory && `device memory ${bytes(memory.active)}, peak ${bytes(memory.peak)}`,
        `restarts ${m.restarts}`, m.load_seconds && `loaded in ${seconds(m.load_seconds)}`,
      ].filter(Boolean).map((text) => el("span", { text })));
      replace(tree, el("span", { text: `prefix cache: ${bytes(m.cache_bytes)} in memory, ${bytes(m.cache_disk_bytes)} on disk` }), m.cache_note && el("span", { text: m.cache_note }));
    };
    const made = { root, show, empty };
    this.cards.set(name, made);
    this.showRole();
    return made;
  }

  async showEnded() {
    let ended;
    try { ({ ended } = await get("/v1/requests?limit=30")); } catch { return; }
    if (!ended.length) { replace(this.ended, el("p", { class: "dim", text: "No requests yet." })); return; }
    const head = ["time", "request", "model", "result", "prompt", "cached", "generated", "first token", "tokens/s", "duration"];
    replace(this.ended, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { text })))),
      el("tbody", {}, ...ended.map((r) => el("tr", {}, ...[
        clock(r.ended_at * 1000), r.id, r.model, r.outcome, count(r.prompt_tokens), count(r.cached_tokens), count(r.generated_tokens),
        seconds(r.ttft_seconds), rate(r.tokens_per_second), seconds(r.seconds),
      ].map((text, i) => el("td", { text, class: i === 3 && text !== "ok" ? "bad" : i === 1 ? "mono" : null })))))));
  }

  toggleLog() {
    if (this.unlog) {
      this.unlog();
      this.unlog = null;
      this.log.hidden = true;
      this.logging.textContent = "Show log";
      return;
    }
    this.log.hidden = false;
    this.logging.textContent = "Hide log";
    this.unlog = follow("/v1/logs/stream?tail=100", (event, line) => {
      const near = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      const { time, level, logger, message, trace, ...fields } = line;
      const rest = Object.entries(fields).filter(([, v]) => v !== null).map(([k, v]) => `${k}=${v}`).join(" ");
      const text = event === "gap" ? `… ${line.missed} lines missed` : `${clock(time)} ${message} ${rest}${trace ? `\n${trace}` : ""}`;
      this.log.append(el("div", { class: level ?? "", text }));
      while (this.log.childElementCount > MOST_LINES) this.log.firstElementChild.remove();
      if (near) this.log.scrollTop = this.log.scrollHeight;
    }, () => {}, () => replace(this.log));
  }
}

