// TeX formulas into MathML: the part of it that models write. What is not understood, or is too much, is
// shown as it was written.

import { ACCENTS, BIG, ENVIRONMENTS, FUNCTIONS, OPERATORS, SPACES, SYMBOLS, styled } from "./tex_symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 4000;
const DEEPEST = 40;
const TOKEN = /\\(?:[a-zA-Z]+\*?|[\s\S])|[0-9]+(?:\.[0-9]+)?|\s+|%[^\n]*|[\s\S]/gu;

class NotUnderstood extends Error {}

/** A `math` element, or null where the formula is not understood. */
export function formula(text, display) {
  if (text.length > LONGEST) return null;
  try {
    const reader = new Reader(text, display);
    const row = reader.row(() => reader.done, 0);
    const math = node("math", { display: display ? "block" : "inline" }, row);
    math.setAttribute("aria-label", text.trim());
    return math;
  } catch (error) {
    if (error instanceof NotUnderstood) return null;
    throw error;
  }
}

function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const identifier = (text, attributes) => node("mi", attributes, text);
const operator = (text, attributes) => node("mo", attributes, text);
const words = (text) => node("mtext", {}, text.replaceAll(" ", "\u00a0"));

class Reader {
  constructor(text, display) {
    this.tokens = (text.match(TOKEN) ?? []).filter((t) => !t.startsWith("%"));
    this.at = 0;
    this.display = display;
    this.variant = "";
  }

  get done() { return this.at >= this.tokens.length; }
  get token() { return this.tokens[this.at]; }

  skip() { while (!this.done && this.token.trim() === "") this.at++; }

  next() {
    this.skip();
    if (this.done) throw new NotUnderstood();
    return this.tokens[this.at++];
  }

  expect(token) { if (this.next() !== token) throw new NotUnderstood(); }

  /** Everything up to where `ends` says so, as one element. */
  row(ends, depth) {
    if (depth > DEEPEST) throw new NotUnderstood();
    const found = [];
    for (this.skip(); !ends(); this.skip()) {
      if (this.done) throw new NotUnderstood();
      if (this.token === "\\over") { // {a \over b}
        this.at++;
        return node("mfrac", {}, node("mrow", {}, ...found), this.row(ends, depth + 1));
      }
      found.push(this.scripted(depth));
    }
    return found.length === 1 ? found[0] : node("mrow", {}, ...found);
  }

  /** An atom with what stands below and above it. */
  scripted(depth) {
    const atom = this.token === "^" || this.token === "_" ? node("mrow") : this.atom(depth);
    let below = null, above = null, primes = "", stacked = atom.limits ?? false;
    for (this.skip(); !this.done; this.skip()) {
      if (this.token === "\\limits" || this.token === "\\nolimits") stacked = this.next() === "\\limits";
      else if (this.token === "'") { this.at++; primes += "′"; }
      else if (this.token === "_" && !below) { this.at++; below = this.argument(depth); }
      else if (this.token === "^" && !above) { this.at++; above = this.argument(depth); }
      else break;
    }
    if (primes) above = above ? node("mrow", {}, operator(primes), above) : operator(primes);
    if (stacked && !this.display) stacked = atom.brace ?? false;
    const [both, under, over] = stacked ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (below && above) return node(both, {}, atom, below, above);
    if (below) return node(under, {}, atom, below);
    return above ? node(over, {}, atom, above) : atom;
  }

  /** What a command takes: a group, or one token. */
  argument(depth) {
    this.skip();
    if (this.token !== "{") return this.atom(depth + 1, true);
    this.at++;
    const inner = this.row(() => this.token === "}", depth + 1);
    this.at++;
    return inner;
  }

  /** A group as it was written. */
  raw() {
    this.expect("{");
    let depth = 1, text = "";
    for (; !this.done; this.at++) {
      if (this.token === "{") depth++;
      else if (this.token === "}" && --depth === 0) { this.at++; return text; }
      text += this.token;
    }
    throw new NotUnderstood();
  }

  atom(depth, single = false) {
    if (depth > DEEPEST) throw new NotUnderstood();
    const token = this.next();
    if (token === "{") {
      const inner = this.row(() => this.token === "}", depth + 1);
      this.at++;
      return node("mrow", {}, inner);
    }
    if (token.startsWith("\\")) return this.command(token.slice(1), depth);
    if (/^[0-9]/.test(token)) {
      if (single && token.length > 1) { // x^23 is x², 3
        this.tokens.splice(this.at, 0, token.slice(1));
        return node("mn", {}, token[0]);
      }
      return node("mn", {}, this.variant ? styled(token, this.variant) : token);
    }
    if (/^\p{L}$/u.test(token)) return this.letter(token);
    if (token === "}" || token === "&" || token === "^" || token === "_" || token === "$" || token === "#") throw new NotUnderstood();
    if (token === "~") return node("mspace", { width: "0.3em" });
    if (token === "-") return operator("−");
    if (token === "*") return operator("∗");
    if ("()[]|".includes(token)) return operator(token, { stretchy: "false" });
    return operator(token);
  }

  letter(c) {
    if (!this.variant) return identifier(c);
    return identifier(styled(c, this.variant), { mathvariant: "normal" });
  }

  command(name, depth) {
    if (Object.hasOwn(SYMBOLS, name)) {
      const text = SYMBOLS[name];
      return /^\p{L}/u.test(text) && text !== "∂" ? identifier(text) : operator(text);
    }
    if (Object.hasOwn(OPERATORS, name)) {
      const made = operator(OPERATORS[name], { largeop: this.display ? "true" : undefined });
      made.limits = !name.includes("int");
      return made;
    }
    if (FUNCTIONS.has(name)) {
      const made = identifier(name === "limsup" ? "lim sup" : name === "liminf" ? "lim inf" : name, { mathvariant: "normal" });
      made.limits = ["lim", "max", "min", "sup", "inf", "limsup", "liminf", "argmax", "argmin", "det", "gcd", "Pr"].includes(name);
      return made;
    }
    if (Object.hasOwn(SPACES, name)) return node("mspace", { width: SPACES[name] });
    if (Object.hasOwn(ACCENTS, name)) return this.accent(name, depth);
    if (BIG.has(name)) return operator(this.fence(), { stretchy: "true", minsize: `${BIG.get(name)}em`, maxsize: `${BIG.get(name)}em` });
    return this.special(name, depth);
  }

  accent(name, depth) {
    const { mark, under, wide } = ACCENTS[name];
    const base = this.argument(depth);
    const sign = operator(mark, { stretchy: wide ? "true" : "false" });
    const made = under
      ? node("munder", { accentunder: "true" }, base, sign)
      : node("mover", { accent: "true" }, base, sign);
    if (name.endsWith("brace")) made.limits = made.brace = true;
    return made;
  }

  special(name, depth) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return node("mfrac", { displaystyle: name === "dfrac" ? "true" : undefined }, this.argument(depth), this.argument(depth));
      case "binom": case "dbinom": case "tbinom":
        return node("mrow", {}, operator("("), node("mfrac", { linethickness: "0" }, this.argument(depth), this.argument(depth)), operator(")"));
      case "sqrt": return this.root(depth);
      case "left": return this.fenced(depth);
      case "begin": return this.environment(this.raw(), depth);
      case "text": case "textrm": case "mbox": case "textnormal": case "textsf": case "texttt": return words(plain(this.raw()));
      case "textbf": case "textit": return words(styled(plain(this.raw()), name.slice(4)));
      case "operatorname": case "operatorname*": {
        const made = identifier(plain(this.raw()), { mathvariant: "normal" });
        made.limits = name.endsWith("*");
        return made;
      }
      case "mathrm": case "mathbf": case "mathbb": case "mathcal": case "mathfrak": case "mathit": case "mathsf": case "mathtt": case "mathscr": case "boldsymbol": case "bm": case "bold":
        return this.styledGroup(name, depth);
      case "overset": case "stackrel": { const over = this.argument(depth); return node("mover", {}, this.argument(depth), over); }
      case "underset": { const under = this.argument(depth); return node("munder", {}, this.argument(depth), under); }
      case "not": return operator(`${this.argument(depth).textContent}\u0338`);
      case "boxed": return node("mrow", { class: "boxed" }, this.argument(depth));
      case "phantom": return node("mphantom", {}, this.argument(depth));
      case "pmod": return node("mrow", {}, operator("("), identifier("mod", { mathvariant: "normal" }), node("mspace", { width: "0.3em" }), this.argument(depth), operator(")"));
      case "bmod": case "mod": return operator("mod", { lspace: "0.3em", rspace: "0.3em" });
      case "tag": return node("mrow", {}, node("mspace", { width: "2em" }), words(`(${plain(this.raw())})`));
      case "color": this.raw(); return node("mrow");
      case "textcolor": this.raw(); return this.argument(depth);
      case "displaystyle": case "textstyle": case "scriptstyle": case "nonumber": case "notag": case "limits": case "nolimits": return node("mrow");
      case "label": this.raw(); return node("mrow");
      case "middle": return operator(this.fence(), { stretchy: "true" });
      default: throw new NotUnderstood();
    }
  }

  root(depth) {
    this.skip();
    if (this.token !== "[") return node("msqrt", {}, this.argument(depth));
    this.at++;
    const index = this.row(() => this.token === "]", depth + 1);
    this.at++;
    return node("mroot", {}, this.argument(depth), index);
  }

  styledGroup(name, depth) {
    const before = this.variant;
    this.variant = { boldsymbol: "bf", bm: "bf", bold: "bf", mathscr: "cal" }[name] ?? name.slice(4);
    try {
      const inner = this.argument(depth);
      return this.variant === "rm" && /^\p{L}+$/u.test(inner.textContent)
        ? identifier(inner.textContent, { mathvariant: "normal" })
        : inner;
    } finally {
      this.variant = before;
    }
  }

  fence() {
    const token = this.next();
    if (token === ".") return "";
    if ("()[]|/<>".includes(token)) return token.replace("<", "⟨").replace(">", "⟩");
    const named = { "\\{": "{", "\\}": "}", "\\|": "‖" }[token] ?? SYMBOLS[token.slice(1)];
    if (!named) throw new NotUnderstood();
    return named;
  }

  fenced(depth) {
    const opening = operator(this.fence(), { fence: "true", stretchy: "true" });
    const inner = this.row(() => this.token === "\\right", depth + 1);
    this.at++;
    return node("mrow", {}, opening, inner, operator(this.fence(), { fence: "true", stretchy: "true" }));
  }

  environment(name, depth) {
    const kind = ENVIRONMENTS[name];
    if (!kind || depth > DEEPEST) throw new NotUnderstood();
    if (kind.columns) this.raw();
    const table = node("mtable", { columnalign: kind.align, displaystyle: kind.display ? "true" : undefined, class: kind.class });
    let cells = [], from = 0;
    const ends = () => this.token === "&" || this.token === "\\\\" || this.token === "\\end";
    for (; ;) {
      cells.push(node("mtd", {}, this.row(ends, depth + 1)));
      const token = this.next();
      if (token === "&") continue;
      if (token === "\\\\" && this.token === "[") while (this.next() !== "]");
      this.skip();
      const last = token === "\\end";
      if (!(last && cells.length === 1 && !cells[0].textContent)) table.append(node("mtr", {}, ...cells));
      cells = [];
      if (last) break;
      if (this.token === "\\hline") this.at++;
      if (++from > 200) throw new NotUnderstood();
    }
    if (this.raw() !== name) throw new NotUnderstood();
    if (!kind.fences) return table;
    const [open, close] = kind.fences;
    return node("mrow", {}, operator(open, { fence: "true", stretchy: "true" }), table, operator(close, { fence: "true", stretchy: "true" }));
  }
}

const plain = (text) => text.replace(/\\([%&_#${} ])/g, "$1").replace(/[{}]/g, "");
