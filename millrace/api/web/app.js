// The page: which view is shown, its colours, and the keys of the keyboard.

import { dialog, el, replace, sign, toast } from "./dom.js";
import { Chat } from "./chat.js";
import { forGood } from "./kept.js";
import { part, untilThere } from "./parts.js";

// The chat's frame is there at once; what is not seen first is fetched after it.
const VIEWS = {
  chat: async () => Chat,
  dashboard: async () => (await part("dashboard")).Dashboard,
  models: async () => (await part("models")).Models,
  connect: async () => (await part("connect")).Connect,
};
const THEME = "millrace-theme";
const made = {};
let shown = null;

const wanted = () => (Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "chat");

async function go() {
  const name = wanted();
  let View;
  try { View = await VIEWS[name](); } catch (error) { toast(error.message, "bad"); return; }
  if (name !== wanted()) return; // somebody went on
  const view = (made[name] ??= new View());
  if (shown === view) return;
  shown?.leave();
  shown = view;
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.title = name === "chat" ? "millrace" : `${name[0].toUpperCase()}${name.slice(1)} – millrace`;
  replace(document.getElementById("main"), view.root);
  view.enter();
}

const again = () => { shown?.leave(); shown?.enter(); };

/** Let somebody give the server's key. */
async function unlock() {
  try { (await part("unlock")).askKey(again); } catch (error) { toast(error.message, "bad"); }
}

function theme(chosen) {
  if (chosen) forGood.set(THEME, chosen);
  const kept = forGood.get(THEME);
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
}

const KEYS = [
  ["Enter", "Send"], ["Shift Enter", "New line"], ["Esc", "Stop generating"], ["↑", "Edit your last message, if the message field is empty"],
  ["/", "Go to the message field"], ["Ctrl K", "Search chats"], ["Ctrl Shift O", "New chat"], ["Alt 1 to 4", "Chat, Dashboard, Models, Connect"], ["?", "Keyboard shortcuts"],
];

function help() {
  dialog("Keyboard shortcuts", el("dl", { class: "keys" }, ...KEYS.flatMap(([keys, what]) => [
    el("dt", {}, ...keys.split(" ").flatMap((k, i) => [i ? " " : "", /^to$/.test(k) ? k : el("kbd", { text: k })])), el("dd", { text: what })])));
}

document.addEventListener("keydown", (event) => {
  const writing = event.target.matches?.("input, textarea, select");
  if (document.querySelector("dialog[open]")) return;
  if (event.altKey && "1234".includes(event.key) && event.key) {
    event.preventDefault();
    location.hash = Object.keys(VIEWS)[Number(event.key) - 1];
  } else if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    location.hash = "chat";
    go().then(() => made.chat.begin());
  } else if (event.key === "?" && !writing) help();
  else if (shown?.key(event)) event.preventDefault();
});

/** What is not there yet, the likeliest first. */
async function fetchRest() {
  const { onLocked } = await part("api");
  onLocked(unlock);
  const { drawing } = await part("desk");
  await drawing();
  for (const view of Object.values(VIEWS)) await view();
}

theme();
document.getElementById("tools").append(
  sign("key", "API key", unlock), sign("sun", "Switch theme", turnTheme), el("button", { type: "button", class: "sign help", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)", text: "?", on: { click: help } }));
addEventListener("hashchange", go);
await go();
document.documentElement.dataset.ready = "";
performance.mark("interactive");
untilThere(fetchRest).catch(() => {}); // each says so where it is wanted
