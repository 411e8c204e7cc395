// Figures as people read them.

export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));

/** A size in decimal units, as `format_bytes` of millrace/sizes.py writes it. */
export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "kB", "MB"]) {
    const shown = n.toFixed(unit === "B" || Math.abs(n) >= 9.95 ? 0 : 1);
    if (Math.abs(shown) < 1000) return `${shown} ${unit}`;
    n /= 1000;
  }
  return Math.abs(n) < 999.95 ? `${n.toFixed(1)} GB` : `${(n / 1000).toFixed(1)} TB`;
}

/** The three numbers of a model's memory, or of all models'; `limit` is what all may take. */
export const memoryText = ({ weights, kv_in_use: state, ceiling, reserved, limit }) =>
  `weights ${bytes(weights)}, key-value memory ${bytes(state)} in use, at most ${bytes(ceiling ?? reserved)}${limit ? ` of ${bytes(limit)}` : ""} in all`;

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}

/** A time that a person waited: `0.3 s`, `3.2 s`, `41 s`. */
export const duration = (s) => (s < 1 ? `${Math.max(0.1, s).toFixed(1)} s` : seconds(s));

export const rate = (r) => (r === null || r === undefined ? "–" : r < 10 ? r.toFixed(1) : count(r));

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function clock(time) {
  return new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export const minute = (time) => new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

/** When, as a word for a list: the time today, else the day. */
export function day(time) {
  const then = new Date(time), now = new Date();
  if (then.toDateString() === now.toDateString()) return then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const year = then.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return then.toLocaleDateString([], { day: "numeric", month: "short", year });
}

export const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
