// Asking for the server's key, which this tab alone keeps.

import { get, key } from "./api.js";
import { dialog, el } from "./dom.js";

/** `unlocked` is called once the server knows the key. */
export function askKey(unlocked) {
  if (document.querySelector("dialog[data-key]")) return;
  const field = el("input", { type: "password", autocomplete: "off", placeholder: "API key", "aria-label": "API key" });
  const trouble = el("p", { class: "bad", role: "alert", text: key.get() ? "The server does not know this key." : "" });
  const form = el("form", {}, el("p", { class: "dim", text: "This server asks for a key. It is kept in this tab only, and is gone when the tab is closed." }), field, trouble,
    el("footer", { class: "row" }, el("span", { class: "grow" }), el("button", { class: "main", text: "Unlock" })));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = key.get(), given = field.value.trim();
    if (!/^[\x21-\x7e]*$/.test(given)) { trouble.textContent = "A key has letters, digits and signs of plain ASCII alone."; return; }
    key.set(given);
    try {
      await get("/v1/models");
      box.close();
      unlocked();
    } catch (error) {
      key.set(before);
      trouble.textContent = error.status === 401 ? "The server does not know this key." : error.message;
    }
  });
  const box = dialog("API key", form);
  box.dataset.key = "";
  field.focus();
}
