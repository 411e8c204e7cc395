// A chart over time: one or two lines with axes, whose values can be read with a pointer. Times without samples are gaps.

import { el, replace, svg } from "./dom.js";
import { clock, minute } from "./format.js";

const HEIGHT = 168, TOP = 18, RIGHT = 10, BOTTOM = 22;
const LETTER = 6.3; // pixels of a letter of a label, about
const GAP = 5; // seconds without a sample that are a gap; there is one a second
const SHORTEST = 60, LONGEST = 600; // seconds that are shown
const STEPS = [10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300]; // seconds between two labels of the time

/** The seconds that samples cover up to `now`, within what a chart shows. */
export const spanOf = (times, now) => Math.min(LONGEST, Math.max(SHORTEST, now - (times[0] ?? now)));

export class Plot {
  /**
   * `lines` are { name, value(samples, i) }, where null is no value. `format` writes a value; `unit` is written over the axis
   * where that does not; `top` is the end of the axis where it is fixed, and `whole` is for values without fractions.
   */
  constructor(title, lines, format, { unit = "", top = 0, whole = false } = {}) {
    Object.assign(this, { title, lines, format, unit, top, whole, samples: null, width: 0, pointer: null });
    this.legend = el("div", { class: "legend" });
    this.drawing = svg("svg", { role: "img", height: HEIGHT });
    this.root = el("figure", { class: "card plot" }, el("header", {}, el("h3", { text: title }), this.legend), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => { this.pointer = event.clientX - this.drawing.getBoundingClientRect().left; this.draw(); });
    this.drawing.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
    new ResizeObserver(([entry]) => { this.width = entry.contentRect.width; this.draw(); }).observe(this.drawing);
  }

  /** `now` is the time of the right edge, in seconds since 1970: later than the last sample where the server is away. */
  show(samples, now) {
    Object.assign(this, { samples, now });
    this.draw();
  }

  draw() {
    const times = this.samples?.time ?? [];
    if (!times.length || !this.width) return;
    const { width, now } = this, from = now - spanOf(times, now);
    const columns = this.lines.map((line) => times.map((_, i) => line.value(this.samples, i)));
    const values = ticks(this.top || columns.flat().reduce((most, v) => Math.max(most, v ?? 0), 0), this.whole);
    const labels = values.map(this.format), left = LETTER * Math.max(...labels.map((text) => text.length)) + 10;
    const x = (time) => left + (width - left - RIGHT) * ((time - from) / (now - from));
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / values.at(-1));
    const at = this.pointer === null || this.pointer < left ? null : from + ((this.pointer - left) / (width - left - RIGHT)) * (now - from);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    replace(this.drawing,
      ...gaps(times, from, now).map(([a, b]) => gap(x(a), x(b))),
      ...values.flatMap((v, i) => [svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(v), y2: y(v) }), label(left - 6, y(v) + 4, labels[i], "end", "y")]),
      this.unit && label(left, 11, this.unit, "start", "unit"),
      ...clockTicks(from, now, width - left).flatMap(([time, text]) => [svg("line", { class: "grid", x1: x(time), x2: x(time), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }), label(x(time), HEIGHT - 5, text, "middle", "x")]),
      ...columns.map((column, k) => {
        const runs = runsOf(times, column, from).map((run) => run.map((i) => `${x(times[i]).toFixed(1)} ${y(column[i]).toFixed(1)}`));
        const area = runs.map((run) => `M${run[0].split(" ")[0]} ${y(0)}L${run.join("L")}V${y(0)}Z`).join("");
        return svg("g", {}, k === 0 && svg("path", { class: "area", d: area }), svg("path", { class: `line ${"ab"[k]}`, d: runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.1" : ""}`).join("") }));
      }),
      at !== null && svg("line", { class: "cross", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.read(times, columns, at);
  }

  /** Write the values at a time, or the latest ones. */
  read(times, columns, at) {
    const i = at === null ? times.length - 1 : nearest(times, at);
    const known = Math.abs(times[i] - (at ?? this.now)) <= GAP;
    const text = (k) => (known ? this.format(columns[k][i]) : at === null ? "–" : "no data");
    replace(this.legend, at !== null && el("span", { text: clock(at * 1000) }),
      ...this.lines.map((line, k) => el("span", { class: "ab"[k] }, el("i"), `${line.name} ${text(k)}`)));
    this.drawing.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, k) => `${line.name} ${text(k)}`).join(", ")}`);
  }
}

const label = (x, y, text, anchor, kind) => svg("text", { x, y, "text-anchor": anchor, class: kind, text });

function gap(a, b) {
  return svg("g", { class: "gap" }, svg("rect", { x: a, y: TOP, width: b - a, height: HEIGHT - BOTTOM - TOP }),
    b - a > 60 && label((a + b) / 2, (HEIGHT - BOTTOM + TOP) / 2, "no data", "middle", "none"));
}

/** The times between `from` and `now` for which there are no samples. */
function gaps(times, from, now) {
  const inside = times.filter((t) => t > from), edges = [from, ...inside, now];
  return edges.slice(1).map((t, i) => [edges[i], t]).filter(([a, b]) => b - a > GAP);
}

/** The indices of values that belong together: no gap, nor a value that is missing, is between them. */
function runsOf(times, column, from) {
  const runs = [];
  times.forEach((time, i) => {
    if (time < from || column[i] === null) return;
    if (i > 0 && column[i - 1] !== null && times[i - 1] >= from && time - times[i - 1] <= GAP) runs.at(-1).push(i); else runs.push([i]);
  });
  return runs;
}

function nearest(times, wanted) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - times[low - 1] < times[low] - wanted ? low - 1 : low;
}

/** Round values from 0 to one that is not below `most`. */
function ticks(most, whole) {
  const least = (most || 1) / 4, unit = 10 ** Math.floor(Math.log10(least));
  let step = [1, 2, 2.5, 5, 10].map((f) => f * unit).find((s) => s >= least * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  return Array.from({ length: Math.max(1, Math.ceil((most || 1) / step - 0.001)) + 1 }, (_, i) => i * step);
}

/** Times of the clock for the axis, as many as have room and two at least, between which others can be estimated. */
export function clockTicks(from, now, width) {
  const room = Math.max(2, Math.floor(width / 90)), until = now - ((now - from) * 20) / width;
  const wide = STEPS.findIndex((s) => (now - from) / s <= room);
  const every = (step) => {
    const first = Math.ceil((from + 1) / step) * step, number = Math.max(0, Math.ceil((until - first) / step));
    return Array.from({ length: number }, (_, i) => [first + i * step, (step % 60 ? clock : minute)((first + i * step) * 1000)]);
  };
  for (let i = wide < 0 ? STEPS.length - 1 : wide; ; i -= 1) {
    const found = every(STEPS[i]);
    if (found.length > 1 || i === 0) return found;
  }
}
