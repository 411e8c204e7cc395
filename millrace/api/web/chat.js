// The chat: a conversation, and where the next message is written.

import { announce, button, dialog, el, gauge, icon, replace, sign, toast } from "./dom.js";
import { count } from "./format.js";
import { Answer } from "./answer.js";
import { attachments, shownFile } from "./attach.js";
import * as tree from "./conversation.js";
import { defaults, openSettings, remember } from "./settings.js";
import { likelyModel, modelNamed, refreshModels, server } from "./server.js";
import * as store from "./store.js";
import { exportOne, TalkList } from "./talks.js";
import { TurnView } from "./turn.js";

const SAVE = 2000; // milliseconds between two writes of an answer that comes
const NEAR = 80; // pixels from the end that count as being there

export class Chat {
  constructor() {
    this.talk = tree.begin(defaults());
    this.running = new Map(); // conversation → its answer
    this.views = new Map(); // message → its view
    this.files = [];
    this.list = new TalkList({
      open: (id) => this.open(id),
      begin: () => this.begin(),
      gone: (id) => (id === null || id === this.talk.id) && this.begin(),
      current: () => this.talk,
    });
    this.build();
  }

  build() {
    this.picker = el("select", { "aria-label": "Model", on: { change: () => this.choose(this.picker.value) } });
    this.turns = el("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    this.scroll = el("div", { class: "scroll", tabindex: "-1" }, this.turns);
    this.field = el("textarea", { rows: 1, placeholder: "Ask something", "aria-label": "Message", on: { keydown: (e) => this.typed(e), input: () => this.meter(), paste: (e) => this.pasted(e) } });
    this.shelf = el("div", { class: "files" });
    this.chooser = el("input", { type: "file", multiple: true, hidden: true, on: { change: () => this.attach(this.chooser.files) } });
    this.gauge = gauge("Context used");
    this.used = el("span", { class: "figures" });
    this.go = el("button", { class: "round", type: "submit", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
    this.form = el("form", { on: { submit: (e) => { e.preventDefault(); this.submit(); } } },
      this.shelf, this.field,
      el("div", { class: "row" }, sign("clip", "Attach files", () => this.chooser.click(), { class: "sign big" }), sign("tune", "How to answer", () => this.settings(), { class: "sign big" }),
        el("span", { class: "meter", title: "Tokens of the conversation, and the model's window" }, this.gauge, this.used), this.go, this.chooser));
    for (const [event, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      this.form.addEventListener(event, (e) => { e.preventDefault(); this.form.classList.toggle("over", over); if (event === "drop") this.attach(e.dataTransfer.files); });
    }
    this.root = el("div", { class: "chat" }, this.list.root,
      el("section", { class: "talk", "aria-label": "Chat" },
        el("div", { class: "bar" }, sign("menu", "Conversations", () => this.list.open(true), { class: "sign drawer" }), this.picker,
          el("span", { class: "grow" }),
          sign("down", "Export this conversation", () => this.exporting()), sign("plus", "New chat", () => this.begin())),
        this.scroll,
        el("div", { class: "composer" }, this.form)));
  }

  async enter() {
    this.show();
    this.list.show();
    this.field.focus({ preventScroll: true });
    try { await refreshModels(); } catch (error) { if (error.status !== 401) toast(error.message, "bad"); }
    this.models();
  }

  leave() {}

  get model() { return modelNamed(this.talk.settings.model) ? this.talk.settings.model : likelyModel(); }
  get sees() { return modelNamed(this.model)?.input_modalities?.includes("image") ?? false; }
  get answer() { return this.running.get(this.talk.id) ?? null; }

  models() {
    const states = { loaded: "", loading: " · loading", unloaded: "", failed: " · failed" };
    const options = server.models.map((m) => el("option", { value: m.id, text: m.id + (m.alias_of ? ` (${m.alias_of})` : "") + (states[m.state] ?? "") }));
    replace(this.picker, ...(options.length ? options : [el("option", { text: "No models yet" })]));
    this.picker.value = this.model;
    this.meter();
  }

  choose(model) {
    this.talk.settings.model = model;
    remember(this.talk.settings);
    this.keep();
    this.meter();
  }

  settings() {
    openSettings({ ...this.talk.settings }, (made) => {
      this.talk.settings = made;
      remember(made);
      this.keep();
    });
  }

  exporting() {
    const box = dialog("Export this conversation", el("p", { class: "dim", text: "JSON holds every branch and can be imported again; Markdown is what you see." }),
      el("footer", {}, button("Markdown", () => { exportOne(this.talk, "md"); box.close(); }), button("JSON", () => { exportOne(this.talk, "json"); box.close(); }, { class: "main" })));
  }

  begin() {
    this.talk = tree.begin(defaults());
    this.files = [];
    this.list.open(false);
    this.show();
    this.list.show();
    this.models();
    this.field.focus();
  }

  async open(id) {
    const talk = this.running.get(id)?.talk ?? (await store.load(id));
    if (!talk) return;
    this.talk = talk;
    this.show();
    this.models();
    this.list.show();
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Show the branch that is chosen; views of messages that stay are kept. */
  show() {
    const path = tree.path(this.talk), kept = new Map();
    const acts = {
      edit: (node, text) => this.edit(node, text), again: (node) => this.again(node),
      turn: (node, by) => { tree.turn(this.talk, node, by); this.keep(); this.show(); }, results: (node, texts) => this.results(node, texts),
    };
    for (const node of path) kept.set(node.id, this.views.get(node.id) ?? new TurnView(this.talk, node, acts));
    this.views = kept;
    replace(this.turns, ...[...kept.values()].map((view) => view.root));
    if (!path.length) replace(this.turns, el("div", { class: "hello" }, el("h1", { text: "What would you like to know?" }), el("p", { text: "It runs on this machine. Nothing you write leaves it." })));
    for (const [id, view] of kept) view.update(this.answer?.node.id === id ? this.answer : null);
    replace(this.shelf, ...this.files.map((file, i) => shownFile(file, () => { this.files.splice(i, 1); this.show(); })));
    this.state();
    this.meter();
  }

  state() {
    const busy = Boolean(this.answer);
    replace(this.go, icon(busy ? "stop" : "send"));
    this.go.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.go.title = busy ? "Stop (Esc)" : "Send (Enter)";
  }

  meter() {
    const window = modelNamed(this.model)?.context_window ?? 0;
    const last = tree.path(this.talk).findLast((n) => n.meta?.prompt);
    const told = last ? last.meta.prompt + (last.meta.generated ?? 0) : 0;
    const draft = Math.ceil((this.field.value.length + this.files.reduce((n, f) => n + (f.text?.length ?? 0), 0)) / 4);
    this.gauge.show(window ? (told + draft) / window : 0);
    this.used.textContent = window ? `${draft ? "~" : ""}${count(told + draft)} of ${count(window)}` : "";
  }

  typed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(true); }
    if (event.key === "ArrowUp" && !this.field.value) {
      const last = tree.path(this.talk).findLast((n) => n.role === "user");
      if (last) { event.preventDefault(); this.views.get(last.id).edit(); }
    }
  }

  pasted(event) {
    if (event.clipboardData.files.length) { event.preventDefault(); this.attach(event.clipboardData.files); }
  }

  async attach(files) {
    this.files.push(...(await attachments([...files], this.sees)));
    this.chooser.value = "";
    this.show();
    this.field.focus();
  }

  stop() {
    this.answer?.stop();
  }

  /** Send what was written; the button also stops an answer that comes, the Enter key does not. */
  submit(byKey = false) {
    if (this.answer) { if (!byKey) this.stop(); return; }
    const content = this.field.value.trim();
    if (!content && !this.files.length) return;
    const last = tree.path(this.talk).at(-1);
    const node = tree.add(this.talk, last?.id ?? null, { role: "user", content, attachments: this.files });
    this.talk.title ||= tree.titleOf(content || this.files[0].name);
    this.files = [];
    this.field.value = "";
    this.generate(node.id);
  }

  edit(node, text) {
    if (this.answer) return;
    this.views.delete(node.id);
    if (node.role === "assistant") {
      tree.add(this.talk, node.parent, { role: "assistant", content: text, meta: { model: node.meta?.model, edited: true } });
      this.keep();
      this.show();
      return;
    }
    const made = tree.add(this.talk, node.parent, { role: "user", content: text, attachments: node.attachments });
    this.generate(made.id);
  }

  again(node) {
    if (!this.answer) this.generate(node.parent);
  }

  results(node, texts) {
    let parent = node.id;
    node.calls.forEach((call, i) => { parent = tree.add(this.talk, parent, { role: "tool", call: call.id, content: texts[i] }).id; });
    this.generate(parent);
  }

  async generate(parent) {
    const { talk } = this;
    const node = tree.add(talk, parent, { role: "assistant", content: "", reasoning: "", calls: [], meta: {} });
    let frame = 0, saved = performance.now();
    const answer = new Answer(talk, node, this.model, () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        if (this.talk === talk) this.grown(answer);
        if (performance.now() - saved > SAVE) { saved = performance.now(); this.keep(talk); }
      });
    });
    this.running.set(talk.id, answer);
    this.show();
    this.scroll.scrollTop = this.scroll.scrollHeight;
    await this.keep(talk);
    this.list.show();
    await answer.run();
    this.running.delete(talk.id);
    await this.keep(talk);
    if (this.talk === talk) {
      this.grown(answer);
      this.state();
      announce(node.meta.error ? `The answer failed: ${node.meta.error}` : `Answer: ${node.content.slice(0, 300)}`);
    }
    this.list.show();
    refreshModels().then(() => this.models(), () => {});
  }

  /** Show more of an answer, and stay at the end if that is where the reader is. */
  grown(answer) {
    const { scroll } = this;
    const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
    this.views.get(answer.node.id)?.update(answer);
    if (near) scroll.scrollTop = scroll.scrollHeight;
    if (answer.over) this.meter();
  }

  async keep(talk = this.talk) {
    if (!talk.root.children.length) return;
    talk.updated = Date.now();
    try { await store.save(talk); } catch (error) { toast(`This conversation cannot be kept: ${error.message}`, "bad"); }
  }

  key(event) {
    if (event.key === "Escape" && this.answer) { this.stop(); return true; }
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") { this.list.open(true); return true; }
    if (event.key === "/" && !event.target.matches("input, textarea, select")) { this.field.focus(); return true; }
    return false;
  }
}
