// What goes along with the next message: files that are attached, dropped or pasted, and those still being read.

import { replace, toast } from "./dom.js";
import { attachments, longText, readFile, shownFile } from "./attach.js";

export class Shelf {
  /** `sees` says whether the model takes pictures; `changed` is called when there is more or less on it. */
  constructor(node, sees, changed) {
    Object.assign(this, { node, sees, changed, files: [], reading: [] });
  }

  /** Whether all of it can be sent; what cannot yet is told. */
  get ready() {
    if (this.reading.length) toast(`${this.reading[0].name} is still being read.`);
    return !this.reading.length;
  }

  get characters() { return this.files.reduce((n, f) => n + (f.text?.length ?? 0), 0); }

  /** Nothing goes along in another conversation. */
  begin() {
    this.talk = Symbol();
    this.set([]);
  }

  /** Put these files in the place of what is there. */
  set(files) {
    this.files = files;
    this.show();
  }

  show() {
    const away = (file) => () => { this.set(this.files.filter((f) => f !== file)); this.changed(); };
    replace(this.node, ...this.files.map((file) => shownFile(file, away(file))), ...this.reading.map(readFile));
  }

  async attach(given) {
    const list = [...given], { talk } = this;
    this.reading.push(...list);
    this.show();
    const found = await attachments(list, this.sees());
    this.reading = this.reading.filter((file) => !list.includes(file));
    if (this.talk === talk) this.set([...this.files, ...found]); // else another conversation is shown by now
    else this.show();
    this.changed();
  }
}

/** What was pasted or dropped as files: real ones, or a text that is too long for the field; null if it is neither. */
export function filesIn(data) {
  if (data.files.length) return data.files;
  const text = longText(data.getData("text"));
  return text && [text];
}
