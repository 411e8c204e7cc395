// The page: which view is shown, its key, its colours, and the keys of the keyboard.

import { get, key, onLocked } from "./api.js";
import { dialog, el, replace, sign } from "./dom.js";
import { Chat } from "./chat.js";
import { Connect } from "./connect.js";
import { Dashboard } from "./dashboard.js";
import { Models } from "./models.js";

const VIEWS = { chat: Chat, dashboard: Dashboard, models: Models, connect: Connect };
const THEME = "millrace-theme";
const made = {};
let shown = null;

function go() {
  const name = Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  const view = (made[name] ??= new VIEWS[name]());
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

function askKey() {
  if (document.querySelector("dialog[data-key]")) return;
  const field = el("input", { type: "password", autocomplete: "off", required: true, placeholder: "API key", "aria-label": "API key" });
  const trouble = el("p", { class: "bad", role: "alert", text: key.get() ? "The server does not know this key." : "" });
  const form = el("form", {}, el("p", { class: "dim", text: "This server asks for a key. It is kept in this tab only, and is gone when the tab is closed." }), field, trouble,
    el("footer", { class: "row" }, el("span", { class: "grow" }), el("button", { class: "main", text: "Unlock" })));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = key.get();
    key.set(field.value.trim());
    try {
      await get("/v1/models");
      box.close();
      again();
    } catch (error) {
      key.set(before);
      trouble.textContent = error.status === 401 ? "The server does not know this key." : error.message;
    }
  });
  const box = dialog("API key", form);
  box.dataset.key = "";
  field.focus();
}

function theme(chosen) {
  if (chosen) localStorage.setItem(THEME, chosen);
  const wanted = localStorage.getItem(THEME);
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
}

const KEYS = [
  ["Enter", "send"], ["Shift Enter", "a new line"], ["Esc", "stop the answer"], ["↑", "edit your last message, where nothing is written yet"],
  ["/", "to the message field"], ["Ctrl K", "search conversations"], ["Ctrl Shift O", "new chat"], ["1 to 4 with Alt", "the views"], ["?", "this list"],
];

function help() {
  dialog("Keys", el("dl", { class: "keys" }, ...KEYS.flatMap(([keys, what]) => [
    el("dt", {}, ...keys.split(" ").flatMap((k, i) => [i ? " " : "", /^(to|with|1|4)$/.test(k) ? k : el("kbd", { text: k })])), el("dd", { text: what })])));
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
    go();
    made.chat.begin();
  } else if (event.key === "?" && !writing) help();
  else if (shown?.key(event)) event.preventDefault();
});

theme();
onLocked(askKey);
document.getElementById("tools").append(
  sign("key", "API key", askKey), sign("sun", "Light or dark", turnTheme), el("button", { type: "button", class: "sign help", "aria-label": "Keys", title: "Keys (?)", text: "?", on: { click: help } }));
addEventListener("hashchange", go);
go();
document.documentElement.dataset.ready = "";
performance.mark("interactive");
