// The list of conversations: to find, open, rename, take away, write to a file and read from one.

import { button, confirmed, el, replace, sign, toast } from "./dom.js";
import { day, short } from "./format.js";
import { asMarkdown, checked, wording } from "./conversation.js";
import * as store from "./store.js";

const LARGEST = 200_000_000;
const MOST = 500; // conversations that are shown; a search finds the others

export class TalkList {
  /** `acts`: open(id), begin(), gone(id), current() → conversation or null. */
  constructor(acts) {
    this.acts = acts;
    this.search = el("input", { type: "search", class: "grow", placeholder: "Search", "aria-label": "Search conversations", on: { input: () => this.show() } });
    this.list = el("ul", { "aria-label": "Conversations" });
    this.reader = el("input", { type: "file", accept: ".json,application/json", hidden: true, on: { change: () => this.read() } });
    this.root = el("aside", { class: "talks", "aria-label": "Conversations" },
      el("div", { class: "row" }, button("New chat", () => acts.begin(), { class: "main grow" }), sign("close", "Close the list", () => this.open(false), { class: "sign drawer" })),
      el("div", { class: "row" }, this.search),
      this.list,
      el("div", { class: "row" },
        sign("down", "Export all conversations", () => this.exportAll()),
        sign("up", "Import conversations", () => this.reader.click()),
        el("span", { class: "grow" }),
        sign("trash", "Delete all conversations", () => this.clear())),
      this.reader);
  }

  open(whether) {
    this.root.classList.toggle("open", whether);
    if (whether) this.search.focus();
  }

  async show() {
    const wanted = this.search.value.trim().toLowerCase();
    const asked = (this.asked = Symbol());
    let found;
    try {
      found = await (wanted ? store.found((talk) => wording(talk).toLowerCase().includes(wanted)) : store.listed());
    } catch (error) {
      toast(`Conversations cannot be read: ${error.message}`, "bad");
      return;
    }
    if (asked !== this.asked) return; // somebody typed on
    const here = this.acts.current()?.id;
    replace(this.list, ...found.slice(0, MOST).map(({ id, title, updated }) => el("li", { class: id === here ? "here" : "" },
      el("button", { type: "button", title: title || "New chat", "aria-current": id === here ? "true" : null, on: { click: () => { this.open(false); this.acts.open(id); } } },
        short(title || "New chat", 80), el("time", { text: day(updated) })),
      sign("trash", `Delete ${title || "this chat"}`, () => this.remove(id, title)))));
    if (found.length > MOST) this.list.append(el("li", { class: "dim", text: `${found.length - MOST} older ones: search for them.` }));
    if (!found.length) replace(this.list, el("li", { class: "dim", text: wanted ? "Nothing found." : "No conversations yet." }));
  }

  async remove(id, title) {
    if (!(await confirmed("Delete this conversation?", title || "New chat", "Delete"))) return;
    await this.drop(() => store.forget(id), id);
  }

  async drop(work, id) {
    try { await work(); } catch (error) { toast(`That cannot be deleted: ${error.message}`, "bad"); return; }
    this.acts.gone(id);
    this.show();
  }

  async clear() {
    if (!(await confirmed("Delete all conversations?", "They are in this browser only, and cannot be brought back.", "Delete all"))) return;
    await this.drop(() => store.clear(), null);
  }

  async exportAll() {
    let talks;
    try { talks = await store.all(); } catch (error) { toast(`Conversations cannot be read: ${error.message}`, "bad"); return; }
    saved(`millrace-${new Date().toISOString().slice(0, 10)}.json`, JSON.stringify({ millrace: "conversations", conversations: talks }), "application/json");
    toast(`${talks.length} conversations exported.`);
  }

  async read() {
    const [file] = this.reader.files;
    this.reader.value = "";
    if (!file) return;
    try {
      if (file.size > LARGEST) throw new Error("it is too large");
      const data = JSON.parse(await file.text());
      const talks = (Array.isArray(data?.conversations) ? data.conversations : [data]).map(checked);
      for (const talk of talks) await store.save(talk);
      toast(`${talks.length} ${talks.length === 1 ? "conversation" : "conversations"} imported.`);
      await this.show();
      if (talks.length === 1) this.acts.open(talks[0].id);
    } catch (error) {
      toast(`The file cannot be imported: ${error.message}`, "bad");
    }
  }
}

export function exportOne(talk, as) {
  const name = (talk.title || "conversation").replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
  if (as === "md") saved(`${name}.md`, asMarkdown(talk), "text/markdown");
  else saved(`${name}.json`, JSON.stringify(talk), "application/json");
}

function saved(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name, class: "offstage" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
