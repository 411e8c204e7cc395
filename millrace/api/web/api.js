// Talking to the server: requests, and streams of events. The key lives in this tab alone.

const KEY = "millrace-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
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
/** Be told when a key is needed. */
export const onLocked = (heard) => listeners.add(heard);

async function send(path, { method = "GET", body, signal, headers = {} } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const answer = await fetch(path, {
    method, signal, headers: sent, body: body === undefined ? undefined : JSON.stringify(body), credentials: "omit",
  });
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
  let rest = "";
  try {
    for (let part; !(part = await reader.read()).done;) {
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

/** A stream that begins again when it breaks, until it is stopped. */
export function follow(path, heard, told = () => {}) {
  const control = new AbortController();
  const run = async () => {
    for (let pause = 500; !control.signal.aborted; pause = Math.min(pause * 2, 10_000)) {
      try {
        for await (const group of events(path, { signal: control.signal })) {
          pause = 500;
          for (const { event, data } of group) heard(event, JSON.parse(data));
          told(true);
        }
      } catch (error) {
        if (control.signal.aborted) return;
        if (error instanceof Refused && error.status === 401) { told(false); return; }
      }
      told(false);
      await new Promise((wake) => setTimeout(wake, pause));
    }
  };
  run();
  return () => control.abort();
}
