// The chat's frame: where a message is written and sent from. It is there at once; what holds the conversation
// (desk.js) is fetched after it, and does what was asked for meanwhile.

import { el, gauge, icon, sign, toast } from "./dom.js";
import { part, untilThere } from "./parts.js";

export const hello = () => el("div", { class: "hello" },
  el("h1", { text: "How can I help you?" }), el("p", { text: "The model runs on this server. What you write is sent nowhere else." }));

/** Keep a text where it is when the room for it changes at its upper end, as by a message of the page. */
function holdFromBelow(scroll) {
  let height = 0;
  new ResizeObserver(() => {
    const now = scroll.clientHeight;
    if (now && height) scroll.scrollTop += height - now;
    height = now;
  }).observe(scroll);
}

const unfetched = (error) => toast(error.message, "bad");

export class Chat {
  constructor() {
    this.desk = null;
    this.shown = false;
    this.build();
  }

  build() {
    const picker = el("select", { "aria-label": "Model", on: { change: () => this.ask((desk) => desk.choose(picker.value)) } });
    const turns = el("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": "Conversation" }, hello());
    const scroll = el("div", { class: "scroll", tabindex: "-1" }, turns);
    holdFromBelow(scroll);
    const field = el("textarea", { rows: 1, placeholder: "Send a message", "aria-label": "Message", on: { keydown: (e) => this.typed(e), input: () => this.desk?.meter(), paste: (e) => this.desk?.pasted(e) } });
    const shelf = el("div", { class: "files" });
    const chooser = el("input", { type: "file", multiple: true, hidden: true, on: { change: () => this.ask((desk) => desk.attach(chooser.files)) } });
    const filled = gauge("Context used"), used = el("span", { class: "figures" });
    const go = el("button", { class: "round", type: "submit", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
    const form = el("form", { on: { submit: (e) => { e.preventDefault(); this.submit(); } } },
      shelf, field,
      el("div", { class: "row" }, sign("clip", "Attach files", () => chooser.click(), { class: "sign big" }), sign("tune", "Settings", () => this.ask((desk) => desk.settings()), { class: "sign big" }),
        el("span", { class: "meter", title: "Tokens in this conversation, and the model's context" }, filled, used), go, chooser));
    for (const [event, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      form.addEventListener(event, (e) => { e.preventDefault(); form.classList.toggle("over", over); if (event === "drop") this.desk?.dropped(e.dataTransfer); });
    }
    this.parts = { picker, turns, scroll, field, shelf, chooser, gauge: filled, used, go };
    this.side = el("aside", { class: "talks", "aria-label": "Chats" });
    this.root = el("div", { class: "chat" }, this.side,
      el("section", { class: "talk", "aria-label": "Chat" },
        el("div", { class: "bar" }, sign("menu", "Chats", () => this.ask((desk) => desk.list.open(true)), { class: "sign drawer" }), picker,
          el("span", { class: "grow" }),
          sign("down", "Export chat", () => this.ask((desk) => desk.exporting())), sign("plus", "New chat", () => this.begin())),
        scroll,
        el("div", { class: "composer" }, form)));
  }

  /** Have the desk do something: now, or as soon as it is there. */
  ask(work) {
    if (this.desk) return work(this.desk);
    return this.fetch().then(() => work(this.desk), unfetched);
  }

  async fetch() {
    const { Desk } = await part("desk");
    if (this.desk) return;
    this.desk = new Desk(this.parts);
    this.side.replaceWith(this.desk.list.root);
  }

  enter() {
    this.shown = true;
    this.parts.field.focus({ preventScroll: true });
    untilThere(() => this.fetch(), unfetched).then(() => this.shown && this.desk.enter(), unfetched);
  }

  leave() {
    this.shown = false;
    this.desk?.leave();
  }

  begin() { return this.ask((desk) => desk.begin()); }

  submit(byKey = false) { return this.ask((desk) => desk.submit(byKey)); }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) { this.desk?.typed(event); return; }
    event.preventDefault();
    this.submit(true);
  }

  key(event) { return this.desk?.key(event) ?? false; }
}
