// What is known of the server, shared by all views: its models, and its status while somebody looks.

import { follow, get } from "./api.js";
import { el } from "./dom.js";
import { clock } from "./format.js";

/** `refused` is why this tab's key may not manage the server; null where it may. `wish` is the model to talk to next. */
export const server = { models: [], status: null, samples: null, connected: true, trouble: null, refused: null, wish: null };
const HISTORY = 600; // seconds of samples that are kept
const SILENCE = 8000; // milliseconds without a status, of which one comes every second, after which the server is taken for gone
let ahead = 0; // seconds by which this machine's clock is ahead of the server's
const heard = new Set();
let stop = null;

export async function refreshModels() {
  server.models = (await get("/v1/models")).data;
  return server.models;
}

export async function refreshRole() {
  server.refused = (await get("/v1/key")).reason;
}

export const modelNamed = (name) => server.models.find((m) => m.id === name) ?? null;

/** The model to talk to when nobody chose one: one that is loaded, else the first. */
export function likelyModel() {
  const real = server.models.filter((m) => !m.alias_of);
  return (real.find((m) => m.state === "loaded") ?? real.find((m) => m.state === "loading") ?? real.find((m) => m.state !== "broken") ?? real[0])?.id ?? "";
}

/** Hear of every second's status; one connection serves all who do. */
export function watch(listener) {
  heard.add(listener);
  if (!stop) stop = follow("/v1/status/stream", take, (connected, trouble = null) => { Object.assign(server, { connected, trouble }); tell(); }, undefined, { silence: SILENCE });
  else if (server.status) listener();
  return () => {
    heard.delete(listener);
    if (!heard.size) { stop?.(); stop = null; }
  };
}

function take(event, data) {
  if (event === "history") addSamples(data.samples);
  if (event !== "status") return;
  server.status = data;
  ahead = Date.now() / 1000 - data.sample.time;
  addSamples(Object.fromEntries(Object.entries(data.sample).map(([name, value]) => [name, [value]])));
}

/** The server's time, in seconds since 1970, also while it is away. */
export const serverNow = () => Date.now() / 1000 - ahead;

/**
 * Add samples after those that are older: a server that was restarted remembers nothing of the time before, this tab does.
 * The first status repeats the last sample of the history.
 */
function addSamples(added) {
  if (!added.time?.length) return;
  const known = server.samples ?? { time: [] };
  const from = known.time.findIndex((t) => t > added.time.at(-1) - HISTORY), to = known.time.findIndex((t) => t >= added.time[0]);
  const kept = (name) => (from < 0 ? [] : (known[name] ?? known.time.map(() => null)).slice(from, to < 0 ? undefined : Math.max(from, to)));
  server.samples = Object.fromEntries(Object.keys(added).map((name) => [name, [...kept(name), ...added[name]]]));
}

/** A line that says that the server is away, and since when; the view's numbers, which are old then, are greyed. */
export function connectionNotice(view) {
  const notice = el("p", { class: "error", role: "alert", hidden: true });
  notice.update = () => {
    view().classList.toggle("stale", !server.connected);
    notice.hidden = server.connected;
    const since = server.status ? ` The numbers are from ${clock(server.status.sample.time * 1000)}.` : "";
    const text = `${server.trouble ?? "The connection to the server is lost."}${since} Reconnecting…`;
    if (notice.textContent !== text) notice.textContent = text; // a screen reader says it once
  };
  return notice;
}

const tell = () => { for (const listener of heard) listener(); };
