// Asking for the server's key, which this tab alone keeps.

import { get, key } from "./api.js";
import { dialog, el } from "./dom.js";

/** `unlocked` is called once the server knows the key. */
export function askKey(unlocked) {
  if (document.querySelector("dialog[data-key]")) return;
  const field = el("input", { type: "password", autocomplete: "off", placeholder: "API key", "aria-label": "API key" });
  const trouble = el("p", { class: "bad", role: "alert", text: key.get() ? "Invalid API key." : "" });
  const form = el("form", {}, el("p", { class: "dim", text: "This server needs an API key. It is stored in this tab only, until the tab is closed." }), field, trouble,
    el("footer", { class: "row" }, el("span", { class: "grow" }), el("button", { class: "main", text: "Continue" })));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = key.get(), given = field.value.trim();
    if (!/^[\x21-\x7e]*$/.test(given)) { trouble.textContent = "An API key may contain only letters, digits and punctuation of ASCII."; return; }
    key.set(given);
    try {
      await get("/v1/models");
      box.close();
      unlocked();
    } catch (error) {
      key.set(before);
      trouble.textContent = error.status === 401 ? "Invalid API key." : error.message;
    }
  });
  const box = dialog("API key", form);
  box.dataset.key = "";
  field.focus();
}
