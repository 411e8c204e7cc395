// Models that are being fetched. A fetch goes on whichever view is shown, and each view shows it.

import { objects } from "./api.js";
import { button, el, replace, toast } from "./dom.js";
import { bytes } from "./format.js";
import { refreshModels } from "./server.js";

const fetches = new Map(); // hub id → { source, name, status, done, total, error, over }
const heard = new Set();

const tell = () => { for (const listener of heard) listener(); };

/** Hear of every change of a fetch; returns what ends that. */
export function onFetch(listener) {
  heard.add(listener);
  return () => heard.delete(listener);
}

export const fetchOf = (source) => fetches.get(source) ?? null;
export const allFetches = () => [...fetches.values()];

/** Fetch a model by its hub id; `name` is what it is called. */
export async function fetchModel(source, name = source) {
  if (fetches.has(source) && !fetches.get(source).error) return;
  const state = { source, name, status: "Asking for its files", done: 0, total: 0, error: null, over: false };
  fetches.set(source, state);
  tell();
  try {
    for await (const line of objects("/api/pull", { method: "POST", body: { model: source } })) {
      if (line.error) throw new Error(line.error);
      Object.assign(state, { status: line.status, done: line.completed ?? 0, total: line.total ?? 0 });
      tell();
    }
    await refreshModels();
    state.over = true;
    toast(`${name} is ready to use.`);
  } catch (error) {
    state.error = error.message;
  }
  tell();
}

export function forget(source) {
  fetches.delete(source);
  tell();
}

/** A fetch as an element; what it shows is as new as the last call. `more` goes below it once the model is there. */
export function fetchCard(state, ...more) {
  const { source, name, total, done, error, over } = state;
  if (error) {
    return el("div", { class: "card" }, el("p", { class: "name", text: name }), el("p", { class: "bad", role: "alert", text: error }),
      el("div", { class: "row" }, button("Try again", () => fetchModel(source, name)), button("Close", () => forget(source))));
  }
  if (over) return el("div", { class: "card" }, el("p", {}, el("b", { text: name }), " is ready to use."), el("div", { class: "row" }, ...more));
  const bar = el("progress", { "aria-label": `Fetching ${name}`, ...(total ? { max: total, value: done } : {}) });
  const words = total ? `${bytes(done)} of ${bytes(total)}, ${Math.floor((100 * done) / total)} %` : state.status;
  return el("div", { class: "card" }, el("p", {}, "Fetching ", el("b", { text: name })), el("p", { class: "dim figures", text: words }), bar);
}

/** Keep an element filled with the card of a fetch. */
export function showFetch(node, source, ...more) {
  const state = fetchOf(source);
  replace(node, state && fetchCard(state, ...more));
  return state;
}
