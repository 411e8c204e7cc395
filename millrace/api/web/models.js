// The models: what is here, what is loaded, what could be, and what would fit.

import { get, objects, post, remove } from "./api.js";
import { button, confirmed, el, gauge, replace, toast } from "./dom.js";
import { bytes, count, day } from "./format.js";
import { refreshModels, refreshRole, server, watch } from "./server.js";

const STATES = { loaded: "loaded", loading: "loading", unloaded: "on disk", failed: "failed", broken: "broken" };

export class Models {
  constructor() {
    this.room = el("div", { class: "card" });
    this.list = el("div", { class: "list" });
    this.fits = el("div", { class: "list" });
    this.name = el("input", { class: "grow", placeholder: "org/name on Hugging Face", "aria-label": "Model to fetch", spellcheck: "false", autocapitalize: "off" });
    this.pulls = el("div", { class: "list" });
    const pull = el("form", { class: "row", on: { submit: (e) => { e.preventDefault(); this.pull(this.name.value.trim()); } } }, this.name, el("button", { class: "main", text: "Pull" }));
    const section = (title, ...rest) => el("section", { "aria-label": title }, el("h2", { text: title }), ...rest);
    this.all = el("input", { type: "checkbox", on: { change: () => this.showFits() } });
    this.refused = el("p", { class: "dim", role: "note", hidden: true });
    this.fetching = section("Fetch another", pull, this.pulls);
    this.root = el("div", { class: "view" }, el("div", { class: "page" }, this.room, this.refused,
      section("On this machine", this.list),
      this.fetching,
      section("What fits this machine", el("label", { class: "row dim" }, this.all, "show larger ones, too"), this.fits)));
  }

  enter() {
    this.load();
    this.unwatch = watch(() => this.seen());
  }

  leave() { this.unwatch?.(); }
  key() { return false; }

  async load() {
    try {
      const [library] = await Promise.all([get("/v1/library"), refreshModels(), refreshRole()]);
      this.library = library;
      this.show();
    } catch (error) {
      if (error.status !== 401) toast(error.message, "bad");
    }
  }

  /** Every second: the stages of loads move; whatever else changed is asked for. */
  seen() {
    const key = (server.status?.models ?? []).map((m) => m.name + m.residency + m.pinned).join();
    if (key !== this.known) { this.known = key; this.load(); return; }
    if (this.library && server.models.some((m) => m.state === "loading")) this.show();
  }

  show() {
    this.refused.hidden = !server.refused;
    this.refused.textContent = server.refused ?? "";
    this.fetching.hidden = Boolean(server.refused);
    const { limit_bytes: limit, models } = this.library;
    const reserved = server.status?.memory.reserved ?? this.library.reserved_bytes;
    replace(this.room, el("div", { class: "lead" }, el("h2", { text: "Memory" }), el("span", { class: "dim figures", text: limit ? `${bytes(reserved)} of ${bytes(limit)} reserved, ${bytes(Math.max(0, limit - reserved))} free` : `${bytes(reserved)} reserved` })),
      limit && gauge("Memory reserved").show(reserved / limit));
    const cards = models.map((about) => [about, server.models.find((m) => m.id === about.name)]).filter(([, card]) => card);
    const order = { loading: 0, loaded: 1, failed: 2, broken: 2, unloaded: 3 };
    cards.sort(([, a], [, b]) => order[a.state] - order[b.state]);
    replace(this.list, ...cards.map(([about, card]) => this.card(about, card)));
    if (!cards.length) replace(this.list, el("p", { class: "empty", text: "No models yet. Fetch one below, or start the server with the path of one." }));
    this.showFits();
  }

  card(about, card) {
    const live = server.status?.models.find((m) => m.name === card.id);
    const loading = card.state === "loading", loaded = card.state === "loaded";
    const stage = live?.stage ?? card.stage ?? "";
    const done = /(\d+)%/.exec(stage);
    const act = (label, work, more) => {
      const pressed = button(label, async () => {
        pressed.disabled = true;
        try { await work(); } catch (error) { toast(error.message, "bad"); }
        this.load();
      }, more);
      if (server.refused) Object.assign(pressed, { disabled: true, title: server.refused });
      return pressed;
    };
    const path = `/v1/models/${encodeURIComponent(card.id).replaceAll("%2F", "/")}`;
    const use = loaded || loading
      ? act("Unload", () => post(`${path}/unload`, { wait: false }))
      : act("Load", () => post(`${path}/load`, { wait: false }), { class: "main", disabled: !about.fits });
    return el("div", { class: "card item", data: { model: card.id } },
      el("div", {},
        el("div", { class: "row" }, el("span", { class: `state ${card.state}` }), el("span", { class: "name", text: card.id }),
          el("span", { class: "pill", text: STATES[card.state] }), card.pinned && el("span", { class: "pill good", text: "pinned" }), !about.fits && about.need_bytes && el("span", { class: "pill bad", text: "too large" })),
        el("div", { class: "facts" }, ...[
          about.architecture, about.parameters > 1e6 && `${about.parameters > 1e9 ? `${(about.parameters / 1e9).toFixed(1)} B` : `${count(about.parameters / 1e6)} M`} parameters`, about.quantization, card.context_window && `window ${count(card.context_window)}`,
          about.disk_bytes !== null && `${bytes(about.disk_bytes)} on disk`, about.need_bytes && `needs ${bytes(about.need_bytes)}`,
          card.memory_bytes && `holds ${bytes(card.memory_bytes)}`, card.input_modalities?.includes("image") && "sees pictures",
          card.expires_at && `stays until ${day(card.expires_at)}`, about.aliases.length && `also ${about.aliases.join(", ")}`,
        ].filter(Boolean).map((text) => el("span", { text }))),
        card.error && el("p", { class: "bad", text: card.error })),
      el("div", { class: "row" },
        (loaded || loading) && act(card.pinned ? "Unpin" : "Pin", () => post(`${path}/pin`, { pin: !card.pinned })), use,
        about.removable && act("Delete", () => this.remove(card.id, about), { class: "danger" })),
      loading && el("div", { class: "whole" }, el("p", { class: "dim", text: stage }), el("progress", { max: 100, ...(done ? { value: Number(done[1]) } : {}), "aria-label": stage })));
  }

  async remove(name, about) {
    if (await confirmed(`Delete ${name}?`, `${about.disk_bytes === null ? "Its files" : bytes(about.disk_bytes)} are removed from the server's disk. It can be fetched again.`, "Delete")) {
      await remove("/api/delete", { model: name });
      toast(`${name} is deleted.`);
    }
  }

  showFits() {
    const wanted = this.library?.suggested.filter((s) => s.fits || this.all.checked) ?? [];
    wanted.sort((a, b) => b.bytes - a.bytes);
    replace(this.fits, ...wanted.map((s) => el("div", { class: "card item" },
      el("div", {}, el("div", { class: "row" }, el("span", { class: "name", text: s.name }), el("span", { class: `pill ${s.fits ? "good" : "bad"}`, text: s.fits ? "fits" : "too large" })),
        el("div", { class: "facts" }, el("span", { text: s.good_for }), el("span", { text: `${bytes(s.bytes)} in 4 bits` }), el("span", { text: `needs about ${bytes(s.need_bytes)}` }))),
      el("div", { class: "row" }, !server.refused && button("Fetch", () => { this.name.value = s.source; this.name.focus(); this.name.scrollIntoView({ block: "center" }); })))));
    if (!wanted.length) replace(this.fits, el("p", { class: "empty", text: "None of the models that are known here." }));
  }

  async pull(name) {
    if (!name) return;
    const stage = el("p", { class: "dim", text: "asking" }), bar = el("progress", { "aria-label": `Fetching ${name}` });
    const card = el("div", { class: "card" }, el("p", { class: "name", text: name }), stage, bar);
    this.pulls.append(card);
    this.name.value = "";
    try {
      for await (const line of objects("/api/pull", { method: "POST", body: { model: name } })) {
        if (line.error) throw new Error(line.error);
        stage.textContent = line.total ? `${line.status}: ${bytes(line.completed)} of ${bytes(line.total)}` : line.status;
        if (line.total) { bar.max = line.total; bar.value = line.completed; } else bar.removeAttribute("value");
      }
      card.remove();
      toast(`${name} is here.`);
      this.load();
    } catch (error) {
      bar.remove();
      stage.className = "bad";
      stage.textContent = error.message;
      card.append(button("Close", () => card.remove()));
    }
  }
}
