// Talking to the server: requests, and streams of events. The key lives in this tab alone.

import { forTheTab } from "./kept.js";

const KEY = "millrace-key";
const UNREACHED = "The server cannot be reached.";

export const key = {
  get: () => forTheTab.get(KEY) ?? "",
  set: (value) => forTheTab.set(KEY, value || null),
};

/** What the server said no with. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const listeners = new Set();
let locked = false;

/** Be told when a key is needed, and at once if one was already. */
export function onLocked(heard) {
  listeners.add(heard);
  if (locked) heard();
}

async function send(path, { method = "GET", body, signal, headers = {} } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const options = { method, signal, headers: sent, body: body === undefined ? undefined : JSON.stringify(body), credentials: "omit" };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, UNREACHED);
  }
  locked = answer.status === 401;
  if (answer.ok) return answer;
  let error = {};
  try { error = (await answer.json()).error; } catch { /* not JSON: the status must do */ }
  if (answer.status === 401) for (const heard of listeners) heard();
  const message = typeof error === "string" ? error : error?.message;
  throw new Refused(answer.status, message || `The server answered ${answer.status}.`, error?.code);
}

export const get = async (path, options) => (await send(path, options)).json();

export async function post(path, body = {}, options = {}) {
  const answer = await send(path, { method: "POST", body, ...options });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

export async function remove(path, body) {
  const text = await (await send(path, { method: "DELETE", body })).text();
  return text ? JSON.parse(text) : null;
}

async function* linesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => reader.read().catch((error) => { throw error.name === "AbortError" ? error : new Refused(0, "The connection to the server was lost."); });
  let rest = "";
  try {
    for (let part; !(part = await read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      yield lines;
    }
    if (rest) yield [rest];
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Server-sent events as { event, data }, in the groups in which they came. */
export async function* events(path, options) {
  const answer = await send(path, options);
  let event = "", data = [];
  for await (const lines of linesOf(answer)) {
    const found = [];
    for (const line of lines) {
      if (line === "" || line === "\r") {
        if (data.length) found.push({ event, data: data.join("\n") });
        [event, data] = ["", []];
      } else if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trim());
    }
    if (found.length) yield found;
  }
}

/** Lines of JSON, one object each. */
export async function* objects(path, options) {
  for await (const lines of linesOf(await send(path, options))) {
    for (const line of lines) if (line.trim()) yield JSON.parse(line);
  }
}

const visible = () => new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));

/**
 * A stream that begins again when it breaks, until it is stopped. Nobody looks at a hidden tab, and browsers have six
 * connections for all of a server's tabs: a hidden one has none open. `told` hears whether it is connected, or why not;
 * `silence` are the milliseconds without an event after which it is not.
 */
export function follow(path, heard, told = () => {}, begun = () => {}, { silence = 0 } = {}) {
  let over = false, control = null, pause = 500, timer = 0, silent = false;
  /** A server that is frozen or cut off closes nothing: a stream that is silent for too long is taken for broken. */
  const expect = () => {
    clearTimeout(timer);
    if (silence) timer = setTimeout(() => { silent = true; control.abort(); }, silence);
  };
  const run = async () => {
    while (!over) {
      if (document.hidden) { await visible(); continue; }
      control = new AbortController();
      let trouble = null;
      try {
        begun();
        silent = false;
        expect();
        for await (const group of events(path, { signal: control.signal })) {
          pause = 500;
          for (const { event, data } of group) heard(event, JSON.parse(data));
          told(true);
          expect();
        }
      } catch (error) {
        if (control.signal.aborted && !silent) continue;
        trouble = silent ? new Refused(0, UNREACHED) : error;
      } finally {
        clearTimeout(timer);
      }
      if (over) return;
      told(false, trouble?.status ? trouble.message : null);
      if (trouble?.status === 401) return;
      await new Promise((wake) => setTimeout(wake, pause));
      pause = Math.min(pause * 2, 10_000);
    }
  };
  const hidden = () => document.hidden && control?.abort();
  document.addEventListener("visibilitychange", hidden);
  run();
  return () => {
    over = true;
    control?.abort();
    document.removeEventListener("visibilitychange", hidden);
  };
}
