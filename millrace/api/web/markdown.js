// Markdown that grows, shown as it grows: only the last block is read again, and of what is shown only what
// changed is made anew. Long texts are spread over frames.

import { copied, el, sign } from "./dom.js";
import { highlighter } from "./highlight.js";
import { parseBlocks } from "./blocks.js";
import { parseInline } from "./inline.js";
import { formula } from "./tex.js";

const FRAME = 10; // milliseconds of one frame that may be spent here
const STRETCH = 32_768; // characters that are read at once
const MOST_COLOURED = 200_000; // characters of code
const SAFE = new Set(["http:", "https:", "mailto:"]);

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = ""; // as far as it was read
    this.wanted = "";
    this.blocks = [];
    this.shown = []; // { block, node, … } in their order
    this.fresh = 0; // how many of them are as they should be
    this.frame = 0;
  }

  /** Show this text, which goes on from what was shown before or is another one. */
  update(text) {
    if (!text.startsWith(this.text)) [this.blocks, this.fresh, this.text] = [[], 0, ""];
    this.wanted = text;
    this.pump();
  }

  /** Read a stretch more of the text into blocks. */
  read() {
    const keep = this.stable(), base = this.blocks[keep]?.at ?? 0;
    this.text = this.wanted.slice(0, this.text.length + STRETCH);
    this.blocks.length = keep;
    for (const block of parseBlocks(this.text.slice(base))) {
      block.at += base;
      this.blocks.push(block);
    }
    this.fresh = Math.min(this.fresh, keep);
  }

  /** How many blocks no further text can change: all but the last, and one more if that may yet be another kind. */
  stable() {
    let at = this.blocks.length - 1;
    const lastLine = this.text.lastIndexOf("\n") + 1;
    while (at > 0 && this.blocks[at].at >= lastLine) at--;
    while (at > 0 && this.blocks[at - 1].at === this.blocks[at].at) at--;
    return Math.max(0, at);
  }

  pump() {
    cancelAnimationFrame(this.frame);
    const end = performance.now() + FRAME;
    while (!this.settled) {
      if (this.fresh < this.blocks.length) {
        this.shown[this.fresh] = patched(this.shown[this.fresh], this.blocks[this.fresh], this.root, this.fresh);
        this.fresh++;
      } else this.read();
      if (performance.now() > end && !this.settled) {
        this.frame = requestAnimationFrame(() => this.pump());
        return;
      }
    }
    for (const extra of this.shown.splice(this.blocks.length)) extra.node.remove();
    this.root.classList.toggle("long", this.blocks.length > 150);
  }

  get settled() { return this.fresh >= this.blocks.length && this.text.length === this.wanted.length; }
}

function same(a, b) {
  if (a === b) return true;
  if (a.type !== b.type) return false;
  switch (a.type) {
    case "paragraph": case "math": return a.text === b.text;
    case "heading": return a.text === b.text && a.level === b.level;
    case "code": return a.text === b.text && a.lang === b.lang && a.closed === b.closed;
    case "rule": return true;
    default: return false;
  }
}

/** What shows a block, made from what showed another in its place, if there was one. */
function patched(old, block, parent, place) {
  if (old && same(old.block, block)) { old.block = block; return old; }
  if (old && old.block.type === block.type && old.patch?.(block)) { old.block = block; return old; }
  const made = MAKERS[block.type](block);
  made.block = block;
  if (old) old.node.replaceWith(made.node);
  else parent.insertBefore(made.node, parent.childNodes[place] ?? null);
  return made;
}

/** Blocks inside another. */
function nested(node) {
  const shown = [];
  return (blocks) => {
    blocks.forEach((block, i) => { shown[i] = patched(shown[i], block, node, i); });
    for (const extra of shown.splice(blocks.length)) extra.node.remove();
  };
}

const MAKERS = {
  paragraph(block) {
    const node = el("p");
    const patch = (b) => { node.replaceChildren(inline(b.text)); return true; };
    patch(block);
    return { node, patch };
  },

  heading(block) {
    const node = el(`h${Math.min(6, block.level + 1)}`);
    node.append(inline(block.text));
    return { node };
  },

  rule: () => ({ node: el("hr") }),

  math(block) {
    const node = el("div", { class: "formula", tabindex: "0" });
    node.append(formula(block.text, true) ?? el("code", { text: block.text }));
    return { node };
  },

  quote(block) {
    const node = el("blockquote"), show = nested(node);
    const patch = (b) => { show(b.children); return true; };
    patch(block);
    return { node, patch };
  },

  list(block) {
    const node = el(block.ordered ? "ol" : "ul");
    const items = [];
    const patch = (b) => {
      if (b.ordered !== block.ordered) return false;
      if (b.ordered && b.start !== 1) node.start = b.start; else node.removeAttribute("start");
      node.classList.toggle("loose", b.loose);
      b.items.forEach((item, i) => {
        if (!items[i] || items[i].task !== item.task) {
          const li = el("li"), body = item.task === null ? li : el("div");
          if (item.task !== null) {
            li.className = "task";
            li.append(el("input", { type: "checkbox", disabled: true, checked: item.task, "aria-label": item.task ? "done" : "to do" }), body);
          }
          if (items[i]) items[i].node.replaceWith(li); else node.append(li);
          items[i] = { node: li, task: item.task, show: nested(body) };
        }
        items[i].show(item.children);
      });
      for (const extra of items.splice(b.items.length)) extra.node.remove();
      return true;
    };
    patch(block);
    return { node, patch };
  },

  table(block) {
    const body = el("tbody"), table = el("table"), shown = [];
    const aligned = (tag, text, i) => {
      const cell = el(tag, { class: block.align[i] || null });
      cell.append(inline(text));
      return cell;
    };
    if (block.head) table.append(el("thead", {}, el("tr", {}, ...block.head.map((text, i) => aligned("th", text, i)))));
    table.append(body);
    const patch = (b) => {
      if (String(b.head) !== String(block.head) || String(b.align) !== String(block.align)) return false;
      b.rows.forEach((row, r) => {
        if (shown[r] && shown[r].key === row.join("\0")) return;
        const tr = el("tr", {}, ...row.map((text, i) => aligned("td", text, i)));
        if (shown[r]) shown[r].tr.replaceWith(tr); else body.append(tr);
        shown[r] = { tr, key: row.join("\0") };
      });
      for (const extra of shown.splice(b.rows.length)) extra.tr.remove();
      return true;
    };
    patch(block);
    return { node: el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table), patch };
  },

  code(block) {
    const code = el("code"), label = el("span", { text: block.lang || "text" });
    const copy = sign("copy", "Copy code", () => copied(code.textContent, copy));
    const node = el("div", { class: "code" }, el("header", {}, label, copy), el("pre", { tabindex: "0" }, code));
    let done = "", colour = highlighter(block.lang), last = null;
    const patch = (b) => {
      if (b.lang !== block.lang || !b.text.startsWith(done)) return false;
      // Lines that are whole stay as they are; the last one is looked at again when it is.
      last?.remove();
      last = null;
      const end = b.text.lastIndexOf("\n") + 1;
      if (end > done.length) {
        const made = document.createDocumentFragment();
        if (colour && end < MOST_COLOURED) for (const line of b.text.slice(done.length, end - 1).split("\n")) coloured(made, colour(line), "\n");
        else made.append(b.text.slice(done.length, end));
        code.append(made);
        done = b.text.slice(0, end);
      }
      if (end < b.text.length) {
        last = el("span", { text: b.text.slice(end) });
        code.append(last);
      }
      if (b.closed && last && colour && end < MOST_COLOURED) {
        const made = el("span");
        coloured(made, colour(last.textContent), "");
        last.replaceWith(made);
        last = made;
        colour = null; // nothing comes after
      }
      return true;
    };
    patch(block);
    return { node, patch };
  },
};

function coloured(into, pairs, end) {
  for (const [kind, text] of pairs) into.append(kind ? el("span", { class: kind, text }) : text);
  if (end) into.append(end);
}

const TAGS = { emphasis: "em", strong: "strong", deleted: "del" };

/** A fragment that shows a text's pieces. */
export function inline(text) {
  return shown(parseInline(text));
}

function shown(pieces) {
  const made = document.createDocumentFragment();
  for (const piece of pieces) {
    if (typeof piece === "string") made.append(piece);
    else if (piece.type === "code") made.append(el("code", { text: piece.text }));
    else if (piece.type === "break") made.append(el("br"));
    else if (piece.type === "math") made.append(formula(piece.text, piece.display) ?? el("code", { text: piece.text }));
    else if (piece.type === "link" || piece.type === "picture") made.append(link(piece));
    else {
      const node = el(TAGS[piece.type]);
      node.append(shown(piece.children));
      made.append(node);
    }
  }
  return made;
}

/** Addresses of the web and of mail lead there; whatever else says it is one is text. */
function link(piece) {
  const inside = shown(piece.children);
  let target = null;
  try { target = new URL(piece.href); } catch { /* not an address */ }
  if (!target || !SAFE.has(target.protocol)) {
    const node = el("span", { class: "dead", title: piece.href.slice(0, 200) });
    node.append(inside);
    return node;
  }
  const node = el("a", { href: target.href, target: "_blank", rel: "noopener noreferrer nofollow", title: target.href.slice(0, 200) });
  if (piece.type === "picture") node.append("🖼 "); // pictures from elsewhere are not fetched
  node.append(inside);
  if (!node.textContent.trim()) node.append(target.hostname || target.pathname);
  return node;
}
