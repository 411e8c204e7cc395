// Conversations in the browser's own database. They never leave it but as a file that somebody asks for.

const NAME = "millrace", TALKS = "conversations";
let opened = null;

function open() {
  opened ??= new Promise((done, failed) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TALKS, { keyPath: "id" }).createIndex("updated", "updated");
    asked.onsuccess = () => done(asked.result);
    asked.onerror = () => failed(asked.error);
    asked.onblocked = () => failed(new Error("another tab holds the database"));
  });
  opened.catch(() => { opened = null; });
  return opened;
}

async function inside(mode, work) {
  const base = await open();
  return new Promise((done, failed) => {
    const change = base.transaction(TALKS, mode);
    const asked = work(change.objectStore(TALKS));
    change.oncomplete = () => done(asked?.result);
    change.onerror = change.onabort = () => failed(change.error);
  });
}

export const save = (talk) => inside("readwrite", (talks) => talks.put(talk));
export const load = (id) => inside("readonly", (talks) => talks.get(id));
export const forget = (id) => inside("readwrite", (talks) => talks.delete(id));
export const clear = () => inside("readwrite", (talks) => talks.clear());
export const all = () => inside("readonly", (talks) => talks.getAll());

/** Newest first, as `pick` makes them; what it makes nothing of is left out. One at a time is in memory. */
export async function listed(pick) {
  const base = await open();
  return new Promise((done, failed) => {
    const found = [];
    const asked = base.transaction(TALKS).objectStore(TALKS).index("updated").openCursor(null, "prev");
    asked.onerror = () => failed(asked.error);
    asked.onsuccess = () => {
      const at = asked.result;
      if (!at) { done(found); return; }
      const made = pick(at.value);
      if (made) found.push(made);
      at.continue();
    };
  });
}
