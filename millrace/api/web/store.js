// Conversations in the browser's own database. They never leave it but as a file that somebody asks for. Several
// tabs may change one: what another has added is never lost. Where there is no database, the tab keeps them.

import { fresh, join } from "./conversation.js";

const NAME = "millrace", TALKS = "conversations", LISTED = "listed", STAMPS = "stamps";
const held = new Map(); // conversations, where the browser keeps none
const seen = new Map(); // conversation → the stamp that it had when this tab last read or wrote it
const losses = new Set(), changes = new Set();
const early = []; // what changed before the heads were read
let heads = null; // conversation → its name and time, once they were read
const tabs = globalThis.BroadcastChannel ? new BroadcastChannel(NAME) : null;
let opened = null, lost = null;

if (tabs) tabs.onmessage = ({ data }) => { note(data); for (const heard of changes) heard(data); };

function note(change) {
  const { head, gone } = change;
  if (!heads) early.push(change);
  else if (head) heads.set(head.id, head);
  else if (gone) heads.delete(gone);
  else heads.clear();
}

/** Have it known, here and in the other tabs, what was saved or taken away. */
function tell(change) {
  note(change);
  tabs?.postMessage(change);
}

/** Be told, once, when conversations cannot be kept beyond this tab. */
export function onLost(heard) {
  losses.add(heard);
  if (lost) heard(lost);
}

/** Be told of what other tabs save ({ head }) and take away ({ gone: its id, or null for all }). */
export const onChange = (heard) => changes.add(heard);

function open() {
  opened ??= new Promise((done, failed) => {
    const asked = indexedDB.open(NAME, 2);
    asked.onupgradeneeded = () => {
      const known = asked.result.objectStoreNames.contains(TALKS);
      const talks = known ? asked.transaction.objectStore(TALKS) : asked.result.createObjectStore(TALKS, { keyPath: "id" });
      for (const name of talks.indexNames) talks.deleteIndex(name);
      talks.createIndex(LISTED, ["updated", "title"]);
      talks.createIndex(STAMPS, ["id", "stamp"]);
    };
    asked.onsuccess = () => {
      const base = asked.result;
      base.onclose = base.onversionchange = () => { base.close(); opened = null; };
      done(base);
    };
    asked.onerror = () => failed(asked.error);
    asked.onblocked = () => failed(new Error("another tab has an older version of this page open; close it and reload this one"));
  });
  return opened;
}

async function base() {
  if (lost) return null;
  try {
    return await open();
  } catch (error) {
    opened = null;
    lost = error;
    for (const heard of losses) heard(error);
    return null;
  }
}

/** What `work` asks for in one transaction; `otherwise` is for when there is no database. */
async function inside(mode, work, otherwise) {
  const found = await base();
  if (!found) return otherwise();
  return new Promise((done, failed) => {
    const change = found.transaction(TALKS, mode);
    const asked = work(change.objectStore(TALKS));
    change.oncomplete = () => done(asked?.result);
    change.onerror = change.onabort = () => failed(change.error ?? new Error("the browser aborted it"));
  });
}

/** Write a conversation, with what another tab has written into it meanwhile. */
export async function save(talk) {
  const before = seen.get(talk.id), stamp = fresh();
  await inside("readwrite", (talks) => {
    const put = () => talks.put({ ...talk, stamp });
    const known = talks.index(STAMPS).openKeyCursor(IDBKeyRange.bound([talk.id], [talk.id, []]));
    known.onsuccess = () => {
      if (!known.result || known.result.key[1] === before) { put(); return; }
      const there = talks.get(talk.id);
      there.onsuccess = () => { if (there.result) join(talk, there.result); put(); };
    };
  }, () => held.set(talk.id, talk));
  seen.set(talk.id, stamp);
  tell({ head: brief(talk) });
}

export async function load(id) {
  const talk = await inside("readonly", (talks) => talks.get(id), () => held.get(id));
  if (talk) seen.set(id, talk.stamp);
  return talk;
}

export async function forget(id) {
  await inside("readwrite", (talks) => talks.delete(id), () => held.delete(id));
  tell({ gone: id });
}

export async function clear() {
  await inside("readwrite", (talks) => talks.clear(), () => held.clear());
  tell({ gone: null });
}

export const all = () => inside("readonly", (talks) => talks.getAll(), () => [...held.values()]);

const brief = ({ id, title, updated }) => ({ id, title, updated });
const newest = () => [...held.values()].sort((a, b) => b.updated - a.updated);

/** Names and times of all, newest first; those alone are read, and once. */
export async function listed() {
  if (!heads) {
    const list = await walked((talks) => talks.index(LISTED).openKeyCursor(null, "prev"),
      ({ key: [updated, title], primaryKey }) => ({ id: primaryKey, title, updated }), () => newest().map(brief));
    heads ??= new Map(list.map((head) => [head.id, head]));
    for (const change of early.splice(0)) note(change);
  }
  return [...heads.values()].sort((a, b) => b.updated - a.updated);
}

/** Those of which `wanted` is true, newest first. One at a time is in memory. */
export function found(wanted) {
  return walked((talks) => talks.index(LISTED).openCursor(null, "prev"),
    ({ value }) => wanted(value) && brief(value), () => newest().filter(wanted).map(brief));
}

async function walked(begin, pick, otherwise) {
  const list = [];
  return inside("readonly", (talks) => {
    const asked = begin(talks);
    asked.onsuccess = () => {
      if (!asked.result) return;
      const made = pick(asked.result);
      if (made) list.push(made);
      asked.result.continue();
    };
  }, otherwise).then((other) => other ?? list);
}
