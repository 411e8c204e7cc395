// Figures as people read them.

export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "kB", "MB"]) {
    if (Math.abs(n) < 1000) return `${n.toFixed(0)} ${unit}`;
    n /= 1000;
  }
  return `${n < 10 ? n.toFixed(2) : n.toFixed(1)} GB`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}

export const rate = (r) => (r === null || r === undefined ? "–" : r < 10 ? r.toFixed(1) : count(r));

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function clock(time) {
  return new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** When, as a word for a list: the time today, else the day. */
export function day(time) {
  const then = new Date(time), now = new Date();
  if (then.toDateString() === now.toDateString()) return then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const year = then.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return then.toLocaleDateString([], { day: "numeric", month: "short", year });
}

export const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
