// A plot of the last ten minutes: one or two lines over time, whose figures can be read with a pointer.

import { el, replace, svg } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600, HEIGHT = 140, TOP = 8, BOTTOM = 16;

export class Plot {
  /** `lines` are { name, value(samples, i) }; `told` writes a figure; `most` is the scale, where it is fixed. */
  constructor(title, lines, told, most = 0) {
    Object.assign(this, { lines, told, most, samples: null });
    this.legend = el("div", { class: "legend" });
    this.area = svg("path", { class: "area" });
    this.paths = lines.map((_, i) => svg("path", { class: `line ${"ab"[i]}` }));
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: TOP, y2: TOP }),
      this.area, ...this.paths, this.cross);
    this.since = el("small");
    this.top = el("span", { class: "dim figures" });
    this.root = el("figure", { class: "card plot" }, el("header", {}, el("h3", { text: title }), this.legend), this.drawing,
      el("div", { class: "row dim figures" }, this.since, el("span", { class: "grow" }), el("small", {}, "scale to ", this.top), el("span", { class: "grow" }), el("small", { text: "now" })));
    this.root.style.margin = "0";
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.title = title;
  }

  show(samples) {
    this.samples = samples;
    this.draw();
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    this.at = (event.clientX - box.left) / box.width;
    this.draw();
  }

  draw() {
    const { samples } = this;
    const times = samples?.time ?? [];
    if (!times.length) return;
    const now = times.at(-1), span = Math.min(600, Math.max(60, now - times[0]));
    const x = (i) => WIDTH * (1 - (now - times[i]) / span);
    this.since.textContent = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
    const values = this.lines.map((line) => times.map((_, i) => line.value(samples, i)));
    const most = this.most || nice(Math.max(0, ...values.map((v) => v.reduce((a, b) => Math.max(a, b), 0))));
    const y = (v) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (most ? v / most : 0);
    values.forEach((column, k) => {
      let d = "";
      for (let i = 0; i < column.length; i++) {
        const gap = i === 0 || times[i] - times[i - 1] > 5;
        d += `${gap ? "M" : "L"}${x(i).toFixed(1)} ${y(column[i]).toFixed(1)}`;
      }
      this.paths[k].setAttribute("d", d);
      if (k === 0) this.area.setAttribute("d", d ? `${d.replaceAll("M", "L").replace("L", "M")}L${x(column.length - 1).toFixed(1)} ${y(0)}L${x(0).toFixed(1)} ${y(0)}Z` : "");
    });
    this.top.textContent = this.told(most);
    const at = this.at === undefined || this.at === null ? times.length - 1 : nearest(times, now - span * (1 - this.at));
    const pointing = this.at !== undefined && this.at !== null;
    this.cross.setAttribute("visibility", pointing ? "visible" : "hidden");
    if (pointing) for (const name of ["x1", "x2"]) this.cross.setAttribute(name, x(at));
    replace(this.legend, pointing && el("span", { text: clock(times[at] * 1000) }), ...this.lines.map((line, k) =>
      el("span", { class: "ab"[k] }, el("i"), `${line.name} ${this.told(values[k][at])}`)));
    this.drawing.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, k) => `${line.name} ${this.told(values[k].at(-1))}`).join(", ")}`);
  }
}

function nearest(times, wanted) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

/** A round figure that is not below this one. */
function nice(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((f) => f * unit).find((n) => n >= value * 1.02) ?? 10 * unit;
}
