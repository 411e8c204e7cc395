// The list of conversations: to find, open, rename, take away, write to a file and read from one.

import { button, confirmed, el, replace, sign, toast } from "./dom.js";
import { day, short } from "./format.js";
import { asMarkdown, checked, wording } from "./conversation.js";
import * as store from "./store.js";

const LARGEST = 200_000_000;
const LONGEST_TITLE = 200;
const MOST = 500; // conversations that are shown; a search finds the others

export class TalkList {
  /** `acts`: open(id), begin(), gone(id), rename(id, title), current() → conversation or null. */
  constructor(acts) {
    this.acts = acts;
    this.search = el("input", { type: "search", class: "grow", placeholder: "Search chats", "aria-label": "Search chats", on: { input: () => this.show() } });
    this.list = el("ul", { "aria-label": "Chats" });
    this.reader = el("input", { type: "file", accept: ".json,application/json", hidden: true, on: { change: () => this.read() } });
    this.root = el("aside", { class: "talks", "aria-label": "Chats" },
      el("div", { class: "row" }, button("New chat", () => acts.begin(), { class: "main grow" }), sign("close", "Close", () => this.open(false), { class: "sign drawer" })),
      el("div", { class: "row" }, this.search),
      this.list,
      el("div", { class: "row" },
        sign("down", "Export all chats", () => this.exportAll()),
        sign("up", "Import chats", () => this.reader.click()),
        el("span", { class: "grow" }),
        sign("trash", "Delete all chats", () => this.clear())),
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
      toast(`Chats cannot be read: ${error.message}`, "bad");
      return;
    }
    if (asked !== this.asked || this.list.querySelector("input")) return; // somebody typed on, or renames one
    const here = this.acts.current()?.id;
    replace(this.list, ...found.slice(0, MOST).map(({ id, title, updated }) => el("li", { class: id === here ? "here" : "", data: { id } },
      el("button", { type: "button", title: title || "New chat", "aria-current": id === here ? "true" : null, on: { click: () => { this.open(false); this.acts.open(id); } } },
        short(title || "New chat", 80), el("time", { text: day(updated) })),
      sign("edit", `Rename ${title || "this chat"}`, (event) => this.rename(id, title, event.currentTarget.closest("li"))),
      sign("trash", `Delete ${title || "this chat"}`, () => this.remove(id, title)))));
    if (found.length > MOST) this.list.append(el("li", { class: "dim", text: `${found.length - MOST} older chats: use the search to find them.` }));
    if (!found.length) replace(this.list, el("li", { class: "dim", text: wanted ? "No results." : "No chats yet." }));
  }

  /** Let a title be written in its own row: Enter or a click elsewhere keeps it, Escape does not. */
  rename(id, title, row) {
    const field = el("input", { value: title, class: "grow", maxlength: LONGEST_TITLE, "aria-label": "Title of the conversation" });
    let over = false;
    const end = async (keeps) => {
      if (over) return;
      over = true;
      const made = field.value.trim();
      field.remove();
      if (keeps && made && made !== title) {
        try { await this.acts.rename(id, made); } catch (error) { toast(`That cannot be renamed: ${error.message}`, "bad"); }
      }
      await this.show();
      this.list.querySelector(`[data-id="${id}"] button`)?.focus();
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) end(true);
      else if (event.key === "Escape") end(false);
    });
    replace(row, field);
    field.focus();
    field.select();
  }

  async remove(id, title) {
    if (!(await confirmed("Delete this chat?", title || "New chat", "Delete"))) return;
    await this.drop(() => store.forget(id), id);
  }

  async drop(work, id) {
    try { await work(); } catch (error) { toast(`Deleting failed: ${error.message}`, "bad"); return; }
    this.acts.gone(id);
    this.show();
  }

  async clear() {
    if (!(await confirmed("Delete all chats?", "They are stored in this browser only and cannot be restored.", "Delete all"))) return;
    await this.drop(() => store.clear(), null);
  }

  async exportAll() {
    let talks;
    try { talks = await store.all(); } catch (error) { toast(`Chats cannot be read: ${error.message}`, "bad"); return; }
    saved(`millrace-${new Date().toISOString().slice(0, 10)}.json`, JSON.stringify({ millrace: "conversations", conversations: talks }), "application/json");
    toast(`${talks.length} ${talks.length === 1 ? "chat" : "chats"} exported.`);
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
      toast(`${talks.length} ${talks.length === 1 ? "chat" : "chats"} imported.`);
      await this.show();
      if (talks.length === 1) this.acts.open(talks[0].id);
    } catch (error) {
      toast(`Import failed: ${error.message}`, "bad");
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
