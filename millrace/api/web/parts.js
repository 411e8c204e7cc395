// Parts of the page that are fetched when they are wanted.

const PARTS = {
  api: () => import("./api.js"),
  connect: () => import("./connect.js"),
  dashboard: () => import("./dashboard.js"),
  desk: () => import("./desk.js"),
  models: () => import("./models.js"),
  turn: () => import("./turn.js"),
  unlock: () => import("./unlock.js"),
  welcome: () => import("./welcome.js"),
};
const IMPORT = /^import [{*].* from "(\.\/[^"]+)"/gm;
const PAUSE = 3000; // milliseconds before a server that was not there is tried again
const read = new Map(); // address → a promise of what the file there imports

/** Why a part cannot be had; `outdated` if the server has another page by now. */
export class Missing extends Error {
  constructor(outdated) {
    super(outdated ? "The server has a newer version of this page. Reload it." : "The server cannot be reached. The rest of the page loads when it is back.");
    this.outdated = outdated;
  }
}

async function fetched(address) {
  let answer, text;
  try {
    answer = await fetch(address);
    text = await answer.text();
  } catch { throw new Missing(false); }
  if (!answer.ok) throw new Missing(answer.status === 404);
  return Array.from(text.matchAll(IMPORT), ([, name]) => new URL(name, address).href);
}

function importsOf(address) {
  if (!read.has(address)) {
    read.set(address, fetched(address));
    read.get(address).catch(() => read.delete(address));
  }
  return read.get(address);
}

/**
 * One of them. It is imported once it and all that it imports are in the browser's cache: a browser that could not fetch a
 * module once never tries again.
 */
export async function part(name) {
  const wanted = new Set();
  for (let next = [new URL(`./${name}.js`, import.meta.url).href]; next.length;) {
    for (const address of next) wanted.add(address);
    next = [...new Set((await Promise.all(next.map(importsOf))).flat())].filter((address) => !wanted.has(address));
  }
  return PARTS[name]();
}

/** Do something that needs parts, again and again until they can be had; `told` hears once that they cannot yet. */
export async function untilThere(work, told = () => {}) {
  for (let first = true; ; first = false) {
    try { return await work(); } catch (error) {
      if (!(error instanceof Missing) || error.outdated) throw error;
      if (first) told(error);
    }
    await new Promise((wake) => setTimeout(wake, PAUSE));
  }
}
