// The text of a block into pieces: emphasis, code, links, formulas. One pass and a stack, as CommonMark has
// it; no search is repeated over text that was searched before.

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const DEEPEST = 24; // emphasis within emphasis
const LONGEST_LINK = 2000;
const SPECIAL = /[\\`$<[\]!*_~\nh]/g;

/** Pieces: texts, and objects with a `type`; those of emphasis and links have `children`. */
export function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.head = { type: "head", next: null, prev: null };
    this.tail = this.head;
    this.runs = [];
    this.brackets = [];
    this.absent = new Set(); // what does not come any more
    this.ticks = null;
  }

  parse() {
    const text = this.text;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const stop = found ? found.index : text.length;
      if (stop > this.at) { this.say(text.slice(this.at, stop)); this.at = stop; }
      if (!found) break;
      if (!this.special(found[0])) { this.say(text[this.at]); this.at++; }
    }
    this.emphasise(0);
    return this.pieces(this.head.next, null);
  }

  say(text) {
    if (this.tail.type === "text") this.tail.text += text;
    else this.add({ type: "text", text });
  }

  add(piece) {
    piece.prev = this.tail;
    piece.next = null;
    this.tail = this.tail.next = piece;
    return piece;
  }

  /** Whether something began here; then it was read. */
  special(c) {
    switch (c) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "$": return this.dollars();
      case "<": return this.angle();
      case "!": return this.text[this.at + 1] === "[" && this.bracket(2);
      case "[": return this.bracket(1);
      case "]": return this.close();
      case "\n": return this.line();
      case "h": return this.address();
      default: return this.run(c);
    }
  }

  find(what, from) {
    if (this.absent.has(what)) return -1;
    const found = this.text.indexOf(what, from);
    if (found < 0) this.absent.add(what);
    return found;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") { this.add({ type: "break" }); this.at += 2; return true; }
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", this.at + 2);
      if (end > 0) {
        this.add({ type: "math", display: next === "[", text: this.text.slice(this.at + 2, end) });
        this.at = end + 2;
        return true;
      }
    }
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    this.say(next);
    this.at += 2;
    return true;
  }

  code() {
    if (this.ticks === null) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        const places = this.ticks.get(run[0].length) ?? this.ticks.set(run[0].length, []).get(run[0].length);
        places.push(run.index);
      }
    }
    let length = 1;
    while (this.text[this.at + length] === "`") length++;
    const places = this.ticks.get(length) ?? [];
    while (places.length && places[0] <= this.at) places.shift();
    if (!places.length) { this.say("`".repeat(length)); this.at += length; return true; }
    let inner = this.text.slice(this.at + length, places[0]).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    this.add({ type: "code", text: inner });
    this.at = places[0] + length;
    return true;
  }

  dollars() {
    const { text, at } = this;
    const mark = text[at + 1] === "$" ? "$$" : "$";
    const from = at + mark.length;
    const end = this.find(mark, from);
    if (end < 0 || end === from) return false;
    const inner = text.slice(from, end);
    if (mark === "$") {
      // A sum of money is no formula: the signs stand close, and no digit follows.
      if (/\s/.test(inner[0]) || /\s/.test(inner.at(-1)) || /[0-9]/.test(text[end + 1] ?? "")) return false;
      if (/\w/.test(text[at - 1] ?? "") || inner.length > 1000) return false;
    }
    this.add({ type: "math", display: mark === "$$", text: inner });
    this.at = end + mark.length;
    return true;
  }

  angle() {
    const end = this.find(">", this.at);
    if (end < 0 || end - this.at > LONGEST_LINK) return false;
    const inner = this.text.slice(this.at + 1, end);
    if (/^br ?\/?$/i.test(inner)) this.add({ type: "break" });
    else if (/^(https?:\/\/|mailto:)[^\s<]+$/i.test(inner)) this.link(inner, inner);
    else if (inner.length < 200 && /^[\w.+-]+@[\w-]+(\.[\w-]+)+$/.test(inner)) this.link(`mailto:${inner}`, inner);
    else return false;
    this.at = end + 1;
    return true;
  }

  link(href, text) {
    this.add({ type: "link", href, children: [text], depth: 1 });
  }

  address() {
    const { text, at } = this;
    if (!text.startsWith("http://", at) && !text.startsWith("https://", at)) return false;
    if (/\w/.test(text[at - 1] ?? "")) return false;
    const ADDRESS = /[^\s<>"'`\\^{|}*]*/y;
    ADDRESS.lastIndex = at;
    let href = ADDRESS.exec(text)[0].slice(0, LONGEST_LINK);
    while (href) {
      const last = href.at(-1);
      const open = last === ")" && href.split("(").length < href.split(")").length;
      if (!open && !".,;:!?_~]".includes(last)) break;
      href = href.slice(0, -1);
    }
    if (href.length < 10) return false;
    this.link(href, href);
    this.at = at + href.length;
    return true;
  }

  line() {
    if (this.tail.type === "text") {
      const bare = this.tail.text.trimEnd();
      const hard = this.tail.text.length - bare.length > 1;
      this.tail.text = bare;
      if (hard) this.add({ type: "break" }); else this.say("\n");
    } else this.say("\n");
    this.at++;
    while (this.text[this.at] === " ") this.at++;
    return true;
  }

  bracket(length) {
    const piece = this.add({ type: "text", text: this.text.slice(this.at, this.at + length), solid: true });
    this.add({ type: "text", text: "" });
    this.brackets.push({ piece, picture: length === 2, runs: this.runs.length });
    this.at += length;
    return true;
  }

  close() {
    const opened = this.brackets.pop();
    if (!opened) return false;
    const target = this.text[this.at + 1] === "(" ? this.target(this.at + 2) : null;
    if (!target) { this.say("]"); this.at++; return true; }
    this.emphasise(opened.runs);
    const { piece, picture } = opened;
    const link = { type: picture ? "picture" : "link", href: target.href, children: this.pieces(piece.next, null), depth: 1 };
    this.tail = piece.prev;
    this.tail.next = null;
    this.add(link);
    if (!picture) this.brackets.length = 0; // links hold no links
    this.at = target.end;
    return true;
  }

  target(from) {
    if (this.find(")", from) < 0) return null;
    const { text } = this, most = Math.min(text.length, from + LONGEST_LINK);
    let at = from, depth = 0;
    while (text[at] === " ") at++;
    const start = at;
    for (; at < most; at++) {
      const c = text[at];
      if (c === "\\") at++;
      else if (c === "(") depth++;
      else if (c === ")" && depth-- === 0) break;
      else if (c === " " || c === "\n") break;
    }
    let href = text.slice(start, at).replace(/\\([!-/:-@[-`{-~])/g, "$1");
    if (href.startsWith("<") && href.endsWith(">")) href = href.slice(1, -1);
    while (text[at] === " " || text[at] === "\n") at++;
    if (text[at] === '"' || text[at] === "'") {
      const end = text.indexOf(text[at], at + 1);
      if (end < 0 || end > most) return null;
      at = end + 1;
      while (text[at] === " ") at++;
    }
    return text[at] === ")" && at < most ? { href, end: at + 1 } : null;
  }

  run(c) {
    const { text, at } = this;
    let end = at + 1;
    while (text[end] === c) end++;
    const length = end - at;
    if (c === "~" && length !== 2) { this.say(text.slice(at, end)); this.at = end; return true; }
    const before = text[at - 1] ?? " ", after = text[end] ?? " ";
    const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const piece = this.add({ type: "text", text: text.slice(at, end), solid: true });
    this.add({ type: "text", text: "" });
    this.runs.push({
      piece, c, length, whole: length,
      opens: c === "_" ? left && (!right || markBefore) : left,
      closes: c === "_" ? right && (!left || markAfter) : right,
    });
    this.at = end;
    return true;
  }

  /** CommonMark's procedure: each closer looks back for its opener, and not beyond what was looked at. */
  emphasise(bottom) {
    const runs = this.runs, floors = new Map();
    for (let k = bottom; k < runs.length; k++) {
      const closer = runs[k];
      while (closer.closes && closer.length) {
        const kind = `${closer.c}${closer.opens}${closer.whole % 3}`;
        let o = k - 1;
        const floor = floors.get(kind) ?? bottom;
        for (; o >= floor; o--) {
          const opener = runs[o];
          if (!opener.length || opener.c !== closer.c || !opener.opens) continue;
          const odd = (opener.closes || closer.opens) && (opener.whole + closer.whole) % 3 === 0;
          if (!odd || (opener.whole % 3 === 0 && closer.whole % 3 === 0)) break;
        }
        if (o < floor) { floors.set(kind, k); break; }
        const opener = runs[o];
        const used = opener.c === "~" ? 2 : opener.length > 1 && closer.length > 1 ? 2 : 1;
        this.wrap(opener, closer, used, opener.c === "~" ? "deleted" : used === 2 ? "strong" : "emphasis");
        for (let m = o + 1; m < k; m++) runs[m].length = 0;
      }
    }
    runs.length = bottom;
  }

  wrap(opener, closer, used, type) {
    opener.length -= used;
    closer.length -= used;
    opener.piece.text = opener.piece.text.slice(used);
    closer.piece.text = closer.piece.text.slice(used);
    const children = this.pieces(opener.piece.next, closer.piece);
    const depth = 1 + Math.max(0, ...children.map((c) => c.depth ?? 0));
    const wrapped = { type, children, depth };
    if (depth > DEEPEST) Object.assign(wrapped, { type: "plain" });
    wrapped.prev = opener.piece;
    wrapped.next = closer.piece;
    opener.piece.next = closer.piece.prev = wrapped;
  }

  pieces(from, until) {
    const found = [];
    for (let piece = from; piece && piece !== until; piece = piece.next) {
      if (piece.type === "text") {
        if (!piece.text) continue;
        if (typeof found.at(-1) === "string") found[found.length - 1] += piece.text;
        else found.push(piece.text);
      } else if (piece.type === "plain") found.push(...piece.children);
      else found.push(piece);
    }
    return found;
  }
}
