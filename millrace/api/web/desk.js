// What the chat holds: a conversation, shown and answered, and those that are kept. The frame (chat.js) comes before it.

import { announce, button, dialog, el, icon, replace, toast } from "./dom.js";
import { count } from "./format.js";
import { Answer } from "./answer.js";
import { hello } from "./chat.js";
import { atEnd, jumpToLatest } from "./jump.js";
import * as tree from "./conversation.js";
import { ContextMeter } from "./meter.js";
import { defaults, openSettings, remember } from "./settings.js";
import { likelyModel, modelNamed, refreshModels, server } from "./server.js";
import { part } from "./parts.js";
import { filesIn, Shelf } from "./shelf.js";
import * as store from "./store.js";
import { exportOne, TalkList } from "./talks.js";

const SAVE = 2000; // milliseconds between two writes of an answer that comes
const AT_ONCE = 60; // messages of a long conversation that are shown before somebody asks for more
const TWICE = 500; // milliseconds after which a second click on the button is meant to stop the answer
const RETRY = 3000; // milliseconds before a server that was not there is tried again

let TurnView = null;

/** How messages are drawn is fetched after the page has come up, since none is there before. */
export async function drawing() {
  ({ TurnView } = await part("turn"));
}

export class Desk {
  /** `parts` are the frame's elements. */
  constructor(parts) {
    Object.assign(this, parts);
    this.talk = tree.begin(defaults());
    this.running = new Map(); // conversation → its answer
    this.views = new Map(); // message → its view
    this.attached = new Shelf(this.shelf, () => this.sees, () => { this.meter(); this.field.focus(); });
    this.from = 0; // the first message that is shown
    this.context = new ContextMeter(this.gauge, this.used, () => this.meter());
    this.lookForEnd = jumpToLatest(this.scroll);
    this.list = new TalkList({
      open: (id) => this.open(id),
      begin: () => this.begin(),
      gone: (id) => (id === null || id === this.talk.id) && this.begin(),
      rename: (id, title) => this.rename(id, title),
      current: () => this.talk,
    });
    store.onLost((error) => toast(`This browser cannot store chats (${error.message}). They are lost when the tab is closed, unless you export them.`, "bad"));
    store.onChange((change) => this.changedElsewhere(change));
  }

  async enter() {
    this.show();
    this.list.show();
    await this.refresh();
    if (server.wish) this.use(server.wish);
    server.wish = null;
  }

  /** Talk to a model that was just fetched, in a conversation without words. */
  use(model) {
    if (this.talk.root.children.length) this.begin();
    this.choose(model);
    this.models();
    this.field.focus();
  }

  /** On a first visit, say what the built-in model is for; it is asked for after all that is needed to talk. */
  async greet() {
    if (this.greeting !== undefined || !server.models.length) return;
    this.greeting = null;
    try {
      const { welcome } = await part("welcome");
      this.greeting = await welcome((model) => this.use(model));
    } catch { this.greeting = undefined; } // it is tried again when the models are asked for again
    this.greeting?.about(this.model);
    if (this.greeting && !tree.path(this.talk).length) this.turns.append(this.greeting);
  }

  leave() { clearTimeout(this.retry); }

  /** Ask which models there are, until the server says so. */
  async refresh() {
    clearTimeout(this.retry);
    try {
      await refreshModels();
      this.unreached = false;
    } catch (error) {
      if (error.status !== 401) {
        if (!this.unreached) toast(error.message, "bad");
        this.unreached = true;
        this.retry = setTimeout(() => this.refresh(), RETRY);
      }
    }
    this.models();
    this.greet();
  }

  /** The model for a conversation; somebody may write faster than the server tells which there are. */
  async modelOf(talk) {
    if (!server.models.length) await this.refresh();
    return modelNamed(talk.settings.model) ? talk.settings.model : likelyModel();
  }

  get model() { return modelNamed(this.talk.settings.model) ? this.talk.settings.model : likelyModel(); }
  get sees() { return modelNamed(this.model)?.input_modalities?.includes("image") ?? false; }
  get answer() { return this.running.get(this.talk.id) ?? null; }

  models() {
    const states = { loaded: "", loading: " · loading", unloaded: "", failed: " · failed to load", broken: " · broken" };
    const options = server.models.map((m) => el("option", { value: m.id, text: m.id + (m.alias_of ? ` (${m.alias_of})` : "") + (states[m.state] ?? "") }));
    replace(this.picker, ...(options.length ? options : [el("option", { text: this.unreached ? "No connection" : "No models yet" })]));
    this.picker.value = this.model;
    this.greeting?.about(this.model);
    this.meter();
  }

  choose(model) {
    this.talk.settings.model = model;
    remember(this.talk.settings);
    this.keep();
    this.greeting?.about(model);
    this.meter();
  }

  settings() {
    openSettings({ ...this.talk.settings }, (made) => {
      this.talk.settings = made;
      remember(made);
      this.keep();
      this.meter();
    }, modelNamed(this.model));
  }

  exporting() {
    const box = dialog("Export chat", el("p", { class: "dim", text: "JSON has every version of every message and can be imported again. Markdown has the versions that you see." }),
      el("footer", {}, button("Markdown", () => { exportOne(this.talk, "md"); box.close(); }), button("JSON", () => { exportOne(this.talk, "json"); box.close(); }, { class: "main" })));
  }

  begin() {
    this.talk = tree.begin(defaults());
    this.attached.begin();
    this.from = 0;
    this.list.open(false);
    this.show();
    this.list.show();
    this.models();
    this.field.focus();
  }

  async open(id) {
    const talk = await this.read(id);
    if (!talk) return;
    this.take(talk);
    this.models();
    this.list.show();
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  async read(id) {
    try {
      await drawing();
      return this.running.get(id)?.talk ?? (await store.load(id));
    } catch (error) {
      toast(`This chat cannot be read: ${error.message}`, "bad");
      return null;
    }
  }

  /** Its place in the list stays: nothing was said in it. */
  async rename(id, title) {
    const talk = id === this.talk.id ? this.talk : (this.running.get(id)?.talk ?? (await store.load(id)));
    if (!talk) return;
    Object.assign(talk, { title, renamed: Date.now() });
    await store.save(talk);
  }

  take(talk) {
    if (talk.id !== this.talk.id) this.from = Math.max(0, tree.path(talk).length - AT_ONCE);
    this.talk = talk;
    this.views.clear();
    this.show();
  }

  /** Another tab has saved a conversation, or taken one away. What is going on here is left alone. */
  async changedElsewhere({ head, gone }) {
    const { talk } = this;
    const untouched = () => this.talk === talk && !this.answer && !this.turns.querySelector(".edit");
    this.list.show();
    if (!talk.root.children.length || !untouched()) return;
    if (head?.id === talk.id) {
      const found = await this.read(talk.id), { scrollTop } = this.scroll;
      if (!found || !untouched()) return;
      this.take(found);
      this.scroll.scrollTop = scrollTop;
    } else if (gone === null || gone === talk.id) {
      toast("This chat was deleted in another tab.");
      this.begin();
    }
  }

  /** Show the branch that is chosen; views of messages that stay are kept. */
  show() {
    const whole = tree.path(this.talk), kept = new Map();
    if (this.from >= whole.length) this.from = Math.max(0, whole.length - AT_ONCE);
    const path = whole.slice(this.from);
    const acts = {
      edit: (node, text) => this.edit(node, text), again: (node) => this.again(node),
      turn: (node, by) => { tree.turn(this.talk, node, by); this.keep(); this.show(); }, results: (node, texts) => this.results(node, texts),
    };
    for (const node of path) kept.set(node.id, this.views.get(node.id) ?? new TurnView(this.talk, node, acts));
    this.views = kept;
    const earlier = this.from > 0 && button(`Show earlier messages (${count(this.from)})`, () => this.earlier(), { class: "earlier" });
    replace(this.turns, earlier, ...[...kept.values()].map((view) => view.root));
    if (!path.length) replace(this.turns, hello(), this.greeting);
    for (const [id, view] of kept) view.update(this.answer?.node.id === id ? this.answer : null);
    this.state();
    this.meter();
    this.lookForEnd();
  }

  earlier() {
    const below = this.scroll.scrollHeight - this.scroll.scrollTop;
    this.from = Math.max(0, this.from - AT_ONCE);
    this.show();
    this.scroll.scrollTop = this.scroll.scrollHeight - below;
  }

  state() {
    const busy = Boolean(this.answer);
    replace(this.go, icon(busy ? "stop" : "send"));
    this.go.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.go.title = busy ? "Stop (Esc)" : "Send (Enter)";
  }

  meter() {
    const draft = this.field.value.length + this.attached.characters;
    this.context.show({ talk: this.talk, model: modelNamed(this.model), answer: this.answer, draft });
  }

  typed(event) {
    if (event.key === "ArrowUp" && !this.field.value) {
      const last = tree.path(this.talk).findLast((n) => n.role === "user");
      if (last) { event.preventDefault(); this.views.get(last.id).edit(); }
    }
  }

  pasted(event) {
    const files = filesIn(event.clipboardData);
    if (files) { event.preventDefault(); this.attach(files); }
  }

  dropped(data) {
    const files = filesIn(data), text = data.getData("text");
    if (files) this.attach(files);
    else if (text) { this.field.setRangeText(text); this.meter(); }
  }

  attach(files) {
    const chosen = this.attached.attach(files);
    this.chooser.value = ""; // the same file may be chosen again
    return chosen;
  }

  stop() {
    this.answer?.stop();
  }

  /** Send what was written; the button also stops an answer that comes, the Enter key does not. */
  async submit(byKey = false) {
    if (this.answer) { if (!byKey && performance.now() - this.sent > TWICE) this.stop(); return; }
    const content = this.field.value.trim();
    if (this.starting || !this.attached.ready || (!content && !this.attached.files.length)) return;
    const { talk, field } = this, { files } = this.attached;
    this.attached.set([]);
    field.value = "";
    if (!(await this.drawn())) { // given back, before what was written meanwhile
      this.attached.set([...files, ...this.attached.files]);
      field.value = [content, field.value].filter(Boolean).join("\n");
      return;
    }
    const last = tree.path(talk).at(-1);
    const node = tree.add(talk, last?.id ?? null, { role: "user", content, attachments: files });
    talk.title ||= tree.titleOf(content || files[0].name);
    this.generate(node.id, talk);
  }

  /** Whether messages can be drawn, which is waited for. */
  async drawn() {
    if (TurnView) return true;
    this.starting = true; // what is written meanwhile stays in the field
    try {
      await drawing();
      return true;
    } catch (error) {
      toast(error.message, "bad");
      return false;
    } finally {
      this.starting = false;
    }
  }

  /** Whether an answer comes yet, beside which nothing else is begun; it is told. */
  occupied() {
    if (this.answer) toast("A response is being generated. Wait for it or stop it first.");
    return Boolean(this.answer);
  }

  edit(node, text) {
    if (this.occupied()) return;
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
    if (!this.occupied()) this.generate(node.parent);
  }

  results(node, texts) {
    if (this.occupied()) return;
    let parent = node.id;
    node.calls.forEach((call, i) => { parent = tree.add(this.talk, parent, { role: "tool", call: call.id, content: texts[i] }).id; });
    this.generate(parent);
  }

  async generate(parent, talk = this.talk) {
    const node = tree.add(talk, parent, { role: "assistant", content: "", reasoning: "", calls: [], meta: {} });
    let frame = 0, saved = performance.now();
    const answer = new Answer(talk, node, () => this.modelOf(talk), () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        if (this.talk === talk) this.grown(answer);
        if (performance.now() - saved > SAVE) { saved = performance.now(); this.keep(talk); }
      });
    });
    this.running.set(talk.id, answer);
    this.sent = performance.now();
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
      announce(node.meta.error ? `The response failed: ${node.meta.error}` : `Response: ${node.content.slice(0, 300)}`);
    }
    this.list.show();
    this.refresh();
  }

  /** Show more of an answer, and stay at the end if that is where the reader is. */
  grown(answer) {
    const { scroll } = this;
    const near = atEnd(scroll);
    this.views.get(answer.node.id)?.update(answer);
    if (near) scroll.scrollTop = scroll.scrollHeight;
    this.lookForEnd();
    this.meter();
  }

  async keep(talk = this.talk) {
    if (!talk.root.children.length) return;
    talk.updated = Date.now();
    try {
      await store.save(talk);
      this.unkept = null;
    } catch (error) {
      if (this.unkept !== talk.id) toast(`This chat cannot be saved: ${error.message}`, "bad");
      this.unkept = talk.id;
    }
  }

  key(event) {
    if (event.key === "Escape" && this.answer) { this.stop(); return true; }
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") { this.list.open(true); return true; }
    if (event.key === "/" && !event.target.matches("input, textarea, select")) { this.field.focus(); return true; }
    return false;
  }
}
