// Markdown into blocks, line by line, in time that grows with the text and not faster. What a model says
// is never markup of the page: HTML stays text. Blocks have a bounded size, so that none takes a frame long.

const MOST_TEXT = 8192; // characters of a paragraph; longer ones go on in another
const MOST_LINES = 400; // lines of a list or quotation; longer ones go on in another
const MOST_CELLS = 1600; // cells of a table; longer ones go on in another
const MOST_COLUMNS = 64;
const DEEPEST = 10;

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]{0,200})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( {1,4}(?! )| (?= )|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const MATH_OPEN = /^ {0,3}(\$\$|\\\[)/;
const TASK = /^\[([ xX])\] /;

/** The blocks of some text. Each has `at`, the offset of its first line in the text. */
export function parseBlocks(text) {
  const lines = text.split("\n");
  const offsets = new Array(lines.length);
  for (let i = 0, at = 0; i < lines.length; i++) {
    offsets[i] = at;
    at += lines[i].length + 1;
    lines[i] = untabbed(lines[i]);
  }
  const blocks = parse(lines, 0);
  for (const block of blocks) block.at = offsets[block.line];
  return blocks;
}

function untabbed(line) {
  if (line.endsWith("\r")) line = line.slice(0, -1);
  if (line[0] !== "\t" && !(line[0] === " " && /^ +\t/.test(line.slice(0, 40)))) return line;
  const lead = /^[ \t]*/.exec(line)[0];
  return lead.replaceAll("\t", "    ") + line.slice(lead.length);
}

const isBlank = (line) => line.length < 1000 && line.trim() === "";
const indent = (line) => { let n = 0; while (line[n] === " ") n++; return n; };

function isRule(line) {
  const bare = line.length < 500 && line.trim().replaceAll(" ", "");
  return bare && bare.length > 2 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

/** Whether a line begins something else in the middle of a paragraph. */
function interrupts(line) {
  if (HEADING.test(line) || FENCE.test(line) || QUOTE.test(line) || isRule(line)) return true;
  if (MATH_OPEN.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && item[1].length < 4 && line.trim() !== item[2] && (item[2].length === 1 || item[2].slice(0, -1) === "1");
}

function parse(lines, depth) {
  const out = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (isBlank(line)) { i++; continue; }
    const from = out.length, began = i;
    i = depth < DEEPEST ? one(lines, i, depth, out) : paragraph(lines, i, out);
    for (let k = from; k < out.length; k++) out[k].line ??= began;
  }
  return out;
}

function one(lines, i, depth, out) {
  const line = lines[i];
  let found;
  if ((found = FENCE.exec(line))) return fenced(lines, i, found, out);
  if ((found = HEADING.exec(line))) {
    let text = line.slice(found[0].length).trim();
    let end = text.length;
    while (text[end - 1] === "#") end--;
    if (end < text.length && (end === 0 || text[end - 1] === " ")) text = text.slice(0, end).trimEnd();
    out.push({ type: "heading", level: found[1].length, text: text.slice(0, MOST_TEXT) });
    return i + 1;
  }
  if (isRule(line)) { out.push({ type: "rule" }); return i + 1; }
  if (QUOTE.test(line)) return quote(lines, i, depth, out);
  if ((found = ITEM.exec(line)) && found[1].length < 4) return list(lines, i, depth, out);
  if ((found = MATH_OPEN.exec(line))) {
    const end = math(lines, i, found, out);
    if (end) return end;
  }
  if (line.includes("|") && i + 1 < lines.length && isDelimiters(lines[i + 1])) return table(lines, i, out);
  return paragraph(lines, i, out);
}

function fenced(lines, i, [, lead, fence, info], out) {
  const body = [];
  let at = i + 1, closed = false;
  for (; at < lines.length; at++) {
    const bare = lines[at].length < 200 ? lines[at].trim() : "";
    if (bare.length >= fence.length && bare === fence[0].repeat(bare.length) && indent(lines[at]) < 4) { closed = true; break; }
    body.push(lead && indent(lines[at]) ? lines[at].slice(Math.min(lead.length, indent(lines[at]))) : lines[at]);
  }
  out.push({ type: "code", lang: info.trim().split(/[\s{,]/, 1)[0].toLowerCase(), text: body.join("\n"), closed });
  return at + (closed ? 1 : 0);
}

function quote(lines, i, depth, out) {
  const inner = [];
  let at = i;
  for (; at < lines.length && inner.length < MOST_LINES; at++) {
    const found = QUOTE.exec(lines[at]);
    if (found) inner.push(lines[at].slice(found[0].length));
    else if (!isBlank(lines[at]) && inner.length && !isBlank(inner[inner.length - 1]) && !interrupts(lines[at])) inner.push(lines[at]);
    else break;
  }
  out.push({ type: "quote", children: parse(inner, depth + 1) });
  return at;
}

function list(lines, i, depth, out) {
  const first = ITEM.exec(lines[i]);
  const sign = first[2].slice(-1), ordered = first[2].length > 1 || /\d/.test(first[2]);
  const items = [];
  let at = i, loose = false, began = i;
  const close = () => {
    if (!items.length) return;
    const start = ordered ? items[0].number : null;
    out.push({ type: "list", ordered, start, loose, items: items.splice(0), line: began });
  };
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length > first[1].length + 1 && items.length === 0) break;
    if (found[2].slice(-1) !== sign || isRule(lines[at])) break;
    if (at - began > MOST_LINES) { close(); began = at; }
    const width = found[0].length + (found[3] === "" ? 1 : 0);
    const inner = [lines[at].slice(found[0].length)];
    let gap = false, end = at + 1;
    for (; end < lines.length && inner.length < MOST_LINES; end++) {
      const line = lines[end];
      if (isBlank(line)) { inner.push(""); gap = true; continue; }
      const space = indent(line);
      // Models indent nested items by two, whatever the width of the outer marker.
      const nests = space >= width || (space >= found[1].length + 2 && ITEM.test(line));
      if (nests) inner.push(line.slice(Math.min(space, width)));
      else if (!gap && !interrupts(line) && !ITEM.test(line)) inner.push(line.trimStart());
      else break;
      if (gap && nests) loose ||= !ITEM.test(line.trimStart());
      gap = false;
    }
    while (inner.length && inner[inner.length - 1] === "") inner.pop();
    if (gap && end < lines.length && ITEM.exec(lines[end])?.[2].slice(-1) === sign) loose = true;
    const task = TASK.exec(inner[0] ?? "");
    if (task) inner[0] = inner[0].slice(4);
    items.push({
      number: ordered ? parseInt(found[2], 10) : 0,
      task: task ? task[1] !== " " : null,
      children: parse(inner, depth + 1),
    });
    at = end;
    const next = at < lines.length ? ITEM.exec(lines[at]) : null;
    if (!next || next[1].length > 3 || indent(lines[at]) < first[1].length - 1) break;
  }
  close();
  return Math.max(at, i + 1);
}

function math(lines, i, [opening, mark], out) {
  const end = mark === "$$" ? "$$" : "\\]";
  const body = [lines[i].slice(opening.length)];
  for (let at = i; at < lines.length && at - i < 200 && !(at > i && isBlank(lines[at])); at++) {
    if (at > i) body.push(lines[at]);
    const last = body[body.length - 1], found = last.length < 5000 ? last.indexOf(end) : -1;
    if (found < 0) continue;
    if (last.slice(found + 2).trim() !== "" && !/^[.,;:]$/.test(last.slice(found + 2).trim())) return 0;
    body[body.length - 1] = last.slice(0, found) + last.slice(found + 2).trim();
    out.push({ type: "math", text: body.join("\n").trim() });
    return at + 1;
  }
  return 0;
}

function isDelimiters(line) {
  if (line.length > 2000 || !line.includes("-")) return false;
  return cells(line).every((cell) => /^:?-+:?$/.test(cell)) && (line.includes("|") || line.includes(":"));
}

function cells(line) {
  let bare = line.trim();
  if (bare.startsWith("|")) bare = bare.slice(1);
  if (bare.endsWith("|") && !bare.endsWith("\\|")) bare = bare.slice(0, -1);
  const found = [];
  let cell = "", code = false;
  for (let i = 0; i < bare.length && found.length < MOST_COLUMNS; i++) {
    const c = bare[i];
    if (c === "\\" && bare[i + 1] === "|") { cell += "|"; i++; }
    else if (c === "|" && !code) { found.push(cell.trim()); cell = ""; }
    else { if (c === "`") code = !code && bare.indexOf("`", i + 1) > 0; cell += c; }
  }
  if (found.length < MOST_COLUMNS) found.push(cell.trim());
  return found;
}

function table(lines, i, out) {
  const head = cells(lines[i].slice(0, MOST_TEXT));
  const align = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : c.startsWith(":") ? "left" : ""));
  if (align.length !== head.length) return paragraph(lines, i, out);
  let rows = [], at = i + 2, shown = head;
  for (; at < lines.length && !isBlank(lines[at]); at++) {
    if (!lines[at].includes("|") && interrupts(lines[at])) break;
    if ((rows.length + 1) * head.length > MOST_CELLS) {
      out.push({ type: "table", head: shown, align, rows });
      [rows, shown] = [[], null];
    }
    const row = cells(lines[at].slice(0, MOST_TEXT)).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row);
  }
  out.push({ type: "table", head: shown, align, rows });
  return at;
}

function paragraph(lines, i, out) {
  let at = i, began = i, size = 0, kept = [];
  const close = () => { if (kept.length) out.push({ type: "paragraph", text: kept.join("\n"), line: began }); kept = []; size = 0; };
  for (; at < lines.length; at++) {
    const line = lines[at];
    if (at > i) {
      if (isBlank(line)) break;
      if (kept.length && line.length < 500 && /^ {0,3}(=+|-+) *$/.test(line)) {
        out.push({ type: "heading", level: line.includes("=") ? 1 : 2, text: kept.join("\n"), line: began });
        return at + 1;
      }
      if (interrupts(line)) break;
      if (line.includes("|") && at + 1 < lines.length && isDelimiters(lines[at + 1])) break;
    }
    if (size + line.length > MOST_TEXT) { close(); began = at; }
    for (let rest = line.trimStart(); ;) {
      if (rest.length <= MOST_TEXT) { kept.push(rest); size += rest.length; break; }
      const cut = rest.lastIndexOf(" ", MOST_TEXT);
      const part = rest.slice(0, cut > MOST_TEXT / 2 ? cut : MOST_TEXT);
      out.push({ type: "paragraph", text: part, line: began });
      rest = rest.slice(part.length);
    }
  }
  close();
  return Math.max(at, i + 1);
}
