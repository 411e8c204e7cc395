// One message on the page: what was said, thought and called, and what can be done with it.

import { button, copied, el, icon, replace, sign } from "./dom.js";
import { count, duration, rate, seconds, short } from "./format.js";
import { siblings } from "./conversation.js";
import { notice } from "./limits.js";
import { MarkdownView } from "./markdown.js";
import { shownFile } from "./attach.js";

const LONG = 1500; // characters of a user's message that are shown at once
const MOST = 100_000; // characters of a tool's words that are shown at all

export class TurnView {
  /** `acts` are what the page does: edit, again, turn, results. */
  constructor(talk, node, acts) {
    Object.assign(this, { talk, node, acts });
    this.root = el("article", { class: `turn ${node.role}`, "aria-label": { user: "You", assistant: "Response", tool: "Tool result" }[node.role] });
    this.foot = el("footer");
    if (node.role === "assistant") this.assistant();
    else if (node.role === "tool") this.tool();
    else this.user();
    this.root.append(this.foot);
    this.update();
  }

  user() {
    const { node } = this;
    if (node.attachments?.length) this.root.append(el("div", { class: "files" }, ...node.attachments.map((a) => shownFile(a))));
    if (!node.content) return;
    const said = el("div", { class: "said" });
    this.root.append(said);
    const long = node.content.length >= LONG || node.content.split("\n", 16).length === 16;
    const fold = (whether) => {
      said.classList.toggle("more", whether);
      said.textContent = whether ? node.content.slice(0, LONG) : node.content;
    };
    fold(long);
    if (!long) return;
    const more = button("Show all", () => {
      fold(!said.classList.contains("more"));
      more.textContent = said.classList.contains("more") ? "Show all" : "Show less";
    });
    this.root.append(more);
  }

  tool() {
    const { node } = this;
    const call = this.talk.nodes[this.calledFrom()]?.calls?.find((c) => c.id === node.call);
    this.root.append(el("div", { class: "call" },
      el("header", {}, icon("tool"), `Result of ${call?.name ?? "a tool"}`), el("pre", { tabindex: "0", text: clipped(node.content) })));
  }

  calledFrom() {
    let at = this.node.parent;
    while (at && this.talk.nodes[at].role === "tool") at = this.talk.nodes[at].parent;
    return at;
  }

  assistant() {
    this.thoughtText = el("div", { class: "text", tabindex: "0" });
    this.thoughtHead = el("summary");
    this.thought = el("details", { class: "thought", hidden: true }, this.thoughtHead, this.thoughtText);
    this.body = el("div", { class: "text" });
    this.markdown = new MarkdownView(this.body);
    this.cards = el("div", { class: "list" });
    this.waits = el("p", { class: "waits", hidden: true });
    this.trouble = el("p", { class: "error", role: "alert", hidden: true });
    this.notice = el("p", { class: "notice", role: "status", hidden: true });
    this.root.append(this.thought, this.body, this.cards, this.waits, this.trouble, this.notice);
  }

  /** Show what has changed; `answer` is there while it is being made. */
  update(answer = null) {
    const { node } = this;
    const live = Boolean(answer && !answer.over);
    this.root.classList.toggle("live", live);
    if (node.role === "assistant") {
      this.think(live);
      this.markdown.update(node.content);
      this.calls(live);
      const silent = live && !node.content && !node.reasoning && !node.calls?.length;
      this.waits.hidden = !silent;
      if (silent) this.waits.textContent = answer.note;
      this.trouble.hidden = !node.meta?.error;
      this.trouble.textContent = node.meta?.error ?? "";
      const text = live ? "" : notice(node.meta);
      this.notice.hidden = !text;
      this.notice.textContent = text;
    }
    if (!live || !this.footed) this.footer(live);
    this.footed = true;
  }

  think(live) {
    const { node } = this;
    this.thought.hidden = !node.reasoning;
    if (!node.reasoning) return;
    const going = live && !node.content && !node.calls?.length;
    const time = node.meta?.thought >= 0 ? ` for ${duration(node.meta.thought)}` : "";
    this.thoughtHead.textContent = going ? "Thinking…" : `Thought${time}`;
    const shown = this.thoughtShown ?? 0;
    if (node.reasoning.length > shown) this.thoughtText.append(node.reasoning.slice(shown));
    this.thoughtShown = node.reasoning.length;
  }

  calls(live) {
    const { node } = this;
    const found = node.calls ?? [];
    const key = `${live}${found.map((c) => c.name + c.arguments).join()}${node.children.length}`;
    if (key === this.called) return;
    this.called = key;
    const open = !live && found.length > 0 && !node.children.some((id) => this.talk.nodes[id].role === "tool");
    const fields = found.map((call) => el("textarea", { "aria-label": `Result of ${call.name}`, placeholder: "Result of the tool" }));
    replace(this.cards, ...found.map((call, i) => el("div", { class: "call" },
      el("header", {}, icon("tool"), call.name || "…"), el("pre", { tabindex: "0", text: clipped(pretty(call.arguments)) }), open && fields[i])),
    open && el("div", { class: "row" }, button(found.length > 1 ? "Send results" : "Send result", () => this.acts.results(node, fields.map((f) => f.value)), { class: "main" })));
  }

  footer(live) {
    const { node, acts } = this;
    const parts = [];
    const { all, at } = siblings(this.talk, node);
    if (all.length > 1 && !live) {
      parts.push(el("span", { class: "branch" }, sign("left", "Previous version", () => acts.turn(node, -1)),
        el("span", { class: "figures", text: `${at + 1}/${all.length}`, "aria-label": `Version ${at + 1} of ${all.length}` }),
        sign("right", "Next version", () => acts.turn(node, 1))));
    }
    const copy = sign("copy", "Copy", () => copied(node.content, copy));
    if (node.content) parts.push(copy);
    if (node.role === "user") parts.push(sign("edit", "Edit", () => this.edit()));
    if (node.role === "assistant") {
      parts.push(sign("edit", "Edit response", () => this.edit()), sign("again", "Regenerate", () => acts.again(node)), el("span", { class: "meta figures", text: told(node.meta) }));
    }
    replace(this.foot, ...parts);
  }

  edit() {
    const { node } = this;
    const field = el("textarea", { value: node.content, "aria-label": "Edit message" });
    const shown = [...this.root.childNodes];
    const back = () => { replace(this.root, ...shown); this.update(); };
    const done = () => this.acts.edit(node, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); back(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
    });
    replace(this.root, el("div", { class: "edit" }, field, el("div", { class: "row" },
      button("Cancel", back), button(node.role === "user" ? "Send" : "Save as new version", done, { class: "main" }))));
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

function told(meta = {}) {
  const parts = [];
  if (meta.model) parts.push(short(meta.model, 40));
  if (meta.edited) parts.push("edited");
  if (meta.ttft !== undefined) parts.push(`${seconds(meta.ttft)} to first token`);
  if (meta.rate) parts.push(`${rate(meta.rate)} tokens/s`);
  if (meta.generated) parts.push(`${count(meta.generated)} tokens`);
  if (meta.cached) parts.push(`${count(meta.cached)} of ${count(meta.prompt)} cached`);
  if (meta.finish === "length") parts.push("max tokens reached");
  if (meta.stopped) parts.push("stopped");
  return parts.join(" · ");
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const clipped = (text) => (text.length > MOST ? `${text.slice(0, MOST)}… ${count(text.length - MOST)} more characters` : text);
