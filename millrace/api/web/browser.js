// The model browser: the hub where it can be reached, and the short names that are known here where not.

import { get } from "./api.js";
import { button, el, replace } from "./dom.js";
import { bytes, count } from "./format.js";
import { allFetches, fetchCard, fetchModel, fetchOf, forget, onFetch } from "./pulls.js";
import { server } from "./server.js";

const PAUSE = 400; // milliseconds without a key before the hub is asked
const SHORTEST = 2; // characters that are searched for
const HUB_ID = /^[A-Za-z0-9][\w.-]*\/[A-Za-z0-9][\w.-]*$/;

export class ModelBrowser {
  /** `use` is called with the name of a model that was fetched and is to be talked to. */
  constructor(use) {
    this.use = use;
    this.library = null;
    this.hub = null; // what the hub found, for the words it was asked
    this.field = el("input", { type: "search", class: "grow", placeholder: "qwen3, llama, or org/name", "aria-label": "Search models", spellcheck: "false", autocapitalize: "off", on: { input: () => this.typed() } });
    this.all = el("input", { type: "checkbox", on: { change: () => this.show() } });
    this.note = el("p", { class: "dim", role: "status" });
    this.fetching = el("div", { class: "list" });
    this.list = el("div", { class: "list" });
    const form = el("form", { class: "row", role: "search", on: { submit: (e) => { e.preventDefault(); this.search(); } } }, this.field, el("button", { class: "main", text: "Search" }));
    this.tools = el("div", { class: "list" }, form, el("label", { class: "row dim" }, this.all, "show models that do not fit"));
    this.root = el("section", { "aria-label": "Get a model" }, el("h2", { text: "Get a model" }), this.tools, this.fetching, this.note, this.list);
  }

  enter() { this.unhear = onFetch(() => this.showFetches()); }

  leave() {
    this.unhear?.();
    clearTimeout(this.waiting);
    this.asking?.abort();
  }

  take(library) {
    this.library = library;
    this.show();
    this.showFetches();
  }

  get wanted() { return this.field.value.trim(); }
  get may() { return !server.refused && this.library?.fetchable !== false; }

  typed() {
    this.hub = null;
    clearTimeout(this.waiting);
    this.asking?.abort();
    if (this.may && this.wanted.length >= SHORTEST) this.waiting = setTimeout(() => this.search(), PAUSE);
    this.show();
  }

  async search() {
    clearTimeout(this.waiting);
    this.asking?.abort();
    const { wanted } = this;
    if (!this.may || wanted.length < SHORTEST) { this.show(); return; }
    const asking = (this.asking = new AbortController());
    this.searching = true;
    this.show();
    let hub;
    try {
      hub = await get(`/v1/hub/search?q=${encodeURIComponent(wanted)}`, { signal: asking.signal });
    } catch (error) {
      if (asking.signal.aborted) return;
      hub = { models: [], trouble: error.message };
    }
    if (asking !== this.asking || wanted !== this.wanted) return;
    this.searching = false;
    this.hub = hub;
    this.show();
  }

  /** Models of the table whose name, title or repository has every word that is written. */
  known() {
    const words = this.wanted.toLowerCase().split(/[\s:_-]+/).filter(Boolean);
    const has = (m) => words.every((word) => `${m.name} ${m.title ?? ""} ${m.source} ${m.good_for ?? ""}`.toLowerCase().includes(word));
    return (this.library?.suggested ?? []).filter(has);
  }

  show() {
    if (!this.library) return;
    this.tools.hidden = !this.may;
    const known = this.known(), sources = new Set(known.map((m) => m.source));
    const found = [...known, ...(this.hub?.models ?? []).filter((m) => !sources.has(m.source))];
    const fitting = found.filter((m) => m.fits || m.installed);
    const shown = this.all.checked ? found : fitting;
    shown.sort((a, b) => Number(b.recommended ?? false) - Number(a.recommended ?? false) || Number(b.fits) - Number(a.fits));
    const rows = shown.map((m) => this.card(m));
    if (this.may && HUB_ID.test(this.wanted) && !found.some((m) => m.source.toLowerCase() === this.wanted.toLowerCase())) rows.unshift(this.direct(this.wanted));
    replace(this.list, ...rows);
    if (!rows.length) replace(this.list, el("p", { class: "empty", text: found.length ? "None of these fits this machine." : "No model of that name is known here." }));
    this.note.textContent = this.said(found.length - shown.length);
  }

  /** Where the list comes from, in a sentence or two. */
  said(hidden) {
    const more = hidden ? ` ${count(hidden)} ${hidden === 1 ? "does" : "do"} not fit this machine.` : "";
    if (this.library.fetchable === false) return "This server serves the models it was started with and no others (--only), so none is fetched here.";
    if (!this.may || this.wanted.length < SHORTEST) return `Models that are known to work here, by their short names.${more}`;
    if (this.searching) return "Searching Hugging Face…";
    if (this.hub?.trouble) return `${this.hub.trouble} Short names that match are shown.${more}`;
    if (this.hub) return `${count(this.hub.models.length)} found on Hugging Face.${more}`;
    return `Short names that match.${more}`;
  }

  card(m) {
    const called = m.name ?? m.source, state = fetchOf(m.source);
    const here = m.installed || server.models.some((s) => s.id === m.source && s.state !== "broken");
    const facts = [
      m.title && m.title !== m.name ? m.title : null, m.uses?.length ? m.uses.join(", ") : m.good_for, m.bits && `${m.bits} bits`,
      m.bytes ? `${bytes(m.bytes)} to fetch` : "size unknown", m.downloads ? `${count(m.downloads)} downloads` : null, m.gated && "asks for its licence to be accepted",
    ].filter(Boolean);
    return el("div", { class: "card item", data: { offer: m.source } },
      el("div", {},
        el("div", { class: "row" }, el("span", { class: "name", text: called }), m.recommended && el("span", { class: "pill good", text: "recommended" }),
          here ? el("span", { class: "pill good", text: "on this machine" }) : el("span", { class: `pill ${m.fits ? "good" : "bad"}`, text: m.fits ? "fits" : "does not fit" })),
        el("div", { class: "facts" }, ...facts.map((text) => el("span", { text }))),
        m.name && el("p", { class: "dim mono small", text: m.source }),
        m.fit_reason && el("p", { class: "small", text: m.fit_reason })),
      el("div", { class: "row" }, this.may && (here
        ? button("Chat", () => this.use(m.source), { "aria-label": `Chat with ${called}` })
        : button("Fetch", () => fetchModel(m.source, called), { class: m.recommended ? "main" : null, disabled: Boolean(state && !state.error), "aria-label": `Fetch ${called}` }))));
  }

  /** What was written is an id of the hub's: it can be fetched as it is. */
  direct(name) {
    return el("div", { class: "card item" }, el("div", {}, el("span", { class: "name", text: name }), el("p", { class: "dim small", text: "By its id on Hugging Face; its size is known once it is asked for." })),
      el("div", { class: "row" }, button("Fetch", () => fetchModel(name), { "aria-label": `Fetch ${name}` })));
  }

  showFetches() {
    const states = allFetches();
    replace(this.fetching, ...states.map((state) => fetchCard(state, button("Chat", () => this.use(state.source), { class: "main", "aria-label": `Chat with ${state.name}` }), button("Close", () => forget(state.source)))));
    const key = states.map((s) => `${s.source} ${s.over} ${Boolean(s.error)}`).join(); // what the buttons of the list depend on
    if (this.library && key !== this.drawn) { this.drawn = key; this.show(); }
  }
}
