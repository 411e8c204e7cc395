// What is known of the server, shared by all views: its models, and its status while somebody looks.

import { follow, get } from "./api.js";

/** `refused` is why this tab's key may not manage the server; null where it may. */
export const server = { models: [], status: null, samples: null, connected: true, trouble: null, refused: null };
const MOST = 600;
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
  if (!stop) stop = follow("/v1/status/stream", take, (connected, trouble = null) => { Object.assign(server, { connected, trouble }); tell(); });
  else if (server.status) listener();
  return () => {
    heard.delete(listener);
    if (!heard.size) { stop?.(); stop = null; }
  };
}

function take(event, data) {
  if (event === "history") server.samples = data.samples;
  if (event !== "status") return;
  server.status = data;
  const columns = (server.samples ??= {});
  const last = columns.time?.at(-1);
  if (last === data.sample.time) return; // the first snapshot repeats the last sample of the history
  for (const [name, value] of Object.entries(data.sample)) {
    const column = (columns[name] ??= []);
    column.push(value);
    if (column.length > MOST) column.shift();
  }
}

const tell = () => { for (const listener of heard) listener(); };
