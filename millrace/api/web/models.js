// The models: what is here, what is loaded, what could be, and what would fit.

import { get, post, remove } from "./api.js";
import { ModelBrowser } from "./browser.js";
import { button, confirmed, el, gauge, replace, toast } from "./dom.js";
import { bytes, count, day, memoryText } from "./format.js";
import { allFetches, onFetch } from "./pulls.js";
import { connectionNotice, refreshModels, refreshRole, server, watch } from "./server.js";

const STATES = { loaded: "loaded", loading: "loading", unloaded: "on disk", failed: "failed", broken: "broken" };

export class Models {
  constructor() {
    this.connection = connectionNotice(() => this.root);
    this.room = el("div", { class: "card" });
    this.list = el("div", { class: "list" });
    this.browser = new ModelBrowser((name) => this.talkTo(name));
    const section = (title, ...rest) => el("section", { "aria-label": title }, el("h2", { text: title }), ...rest);
    this.refused = el("p", { class: "dim", role: "note", hidden: true });
    this.root = el("div", { class: "view" }, el("div", { class: "page" }, this.connection, this.room, this.refused,
      section("On this machine", this.list), this.browser.root));
  }

  enter() {
    this.load();
    this.unwatch = watch(() => this.seen());
    this.unfetched = onFetch(() => this.fetched());
    this.browser.enter();
  }

  leave() {
    this.unwatch?.();
    this.unfetched?.();
    this.browser.leave();
  }

  /** Once a model has been fetched, it is listed. */
  fetched() {
    const over = allFetches().filter((f) => f.over).length;
    if (over !== this.over) { this.over = over; this.load(); }
  }

  /** The chat takes it up when it is shown. */
  talkTo(name) {
    server.wish = name;
    location.hash = "chat";
  }

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
    this.connection.update();
    const key = (server.status?.models ?? []).map((m) => m.name + m.residency + m.pinned).join();
    if (key !== this.known) { this.known = key; this.load(); return; }
    if (this.library && server.models.some((m) => m.state === "loading")) this.show();
  }

  show() {
    this.refused.hidden = !server.refused;
    this.refused.textContent = server.refused ?? "";
    const { limit_bytes: limit, models } = this.library;
    const held = server.status?.memory, reserved = held?.reserved ?? this.library.reserved_bytes;
    replace(this.room, el("div", { class: "lead" }, el("h2", { text: "Memory" }), el("span", { class: "dim figures", text: [held ? memoryText(held) : `at most ${bytes(reserved)} in all`, held?.other_servers && `other servers held ${bytes(held.other_servers)} at the last load`].filter(Boolean).join("; ") })),
      limit && gauge("The most that loaded models may take").show(reserved / limit));
    const cards = models.map((about) => [about, server.models.find((m) => m.id === about.name)]).filter(([, card]) => card);
    const order = { loading: 0, loaded: 1, failed: 2, broken: 2, unloaded: 3 };
    cards.sort(([, a], [, b]) => order[a.state] - order[b.state]);
    replace(this.list, ...cards.map(([about, card]) => this.card(about, card)));
    if (!cards.length) replace(this.list, el("p", { class: "empty", text: "No models yet. Fetch one below, or start the server with the path of one." }));
    this.browser.take(this.library);
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
          card.memory && memoryText(card.memory), card.input_modalities?.includes("image") && "sees pictures",
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
}
