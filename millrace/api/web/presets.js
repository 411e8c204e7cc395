// Prompt presets: system prompts with a name, which the browser keeps as it keeps the settings.

import { button, confirmed, el, replace } from "./dom.js";
import { forGood } from "./kept.js";

const PRESETS = "millrace-presets";
const MOST = 200, LONGEST_NAME = 80, LONGEST_TEXT = 100_000;

/** The presets, by name. What somebody else wrote into the browser's storage is not trusted. */
export function presets() {
  let kept;
  try { kept = JSON.parse(forGood.get(PRESETS) ?? "[]"); } catch { kept = []; }
  return (Array.isArray(kept) ? kept : [])
    .filter((p) => typeof p?.name === "string" && p.name && typeof p.text === "string")
    .slice(0, MOST).map(({ name, text }) => ({ name, text })).sort((a, b) => a.name.localeCompare(b.name));
}

/** What to say in addition where the browser does not keep them. */
const keep = (list) => (forGood.set(PRESETS, JSON.stringify(list)) ? "" : " The browser stores no more: presets are kept until this tab is closed.");
const GONE = "This preset was deleted in another tab.";

/** Why a preset cannot be kept under a name; null if it can. `own` is the name that it has already. */
function trouble(name, text, list, own = null) {
  if (!name) return "Give the preset a name.";
  if (!text.trim()) return "Write a system prompt first.";
  if (text.length > LONGEST_TEXT) return `A preset may have ${LONGEST_TEXT.toLocaleString("en-US")} characters.`;
  if (own !== null && name !== own && list.some((p) => p.name === name)) return `There is a preset called “${name}” already.`;
  if (own === null && list.length >= MOST && !list.some((p) => p.name === name)) return `There are ${MOST} presets already: delete one first.`;
  return null;
}

/** The row above a system prompt: choose a preset for it, save it as one, rename one, delete one. */
export function presetRow(system) {
  const picker = el("select", { "aria-label": "Prompt preset", class: "grow", on: { change: () => choose() } });
  const row = el("div", { class: "row presets" }), note = el("p", { class: "dim", role: "status" });
  const saving = button("Save as preset", () => ask("Save", chosen()?.name ?? "", save));
  const renaming = button("Rename", () => (chosen() ? ask("Rename", chosen().name, rename) : gone()));
  const deleting = button("Delete", remove, { class: "danger", "aria-label": "Delete preset" });
  const chosen = () => presets().find((p) => p.name === picker.value) ?? null;

  /** Show the presets and the one that the prompt is. */
  function show(name = presets().find((p) => p.text === system.value)?.name ?? "") {
    const list = presets();
    replace(picker, el("option", { value: "", text: list.length ? "No preset" : "No presets yet" }), ...list.map((p) => el("option", { value: p.name, text: p.name })));
    picker.value = name;
    picker.disabled = !list.length;
    renaming.hidden = deleting.hidden = !name;
    replace(row, picker, saving, renaming, deleting);
  }

  function choose() {
    if (picker.value && !chosen()) { gone(); return; }
    system.value = chosen()?.text ?? "";
    note.textContent = "";
    show(picker.value);
  }

  function gone() {
    note.textContent = GONE;
    show("");
  }

  /** Ask for a name in place of the row; `done` says what is wrong with it, or null. */
  function ask(label, name, done) {
    const field = el("input", { value: name, class: "grow", maxlength: LONGEST_NAME, placeholder: "Name of the preset", "aria-label": "Name of the preset" });
    const back = () => { note.className = "dim"; note.textContent = ""; show(); saving.focus(); };
    const finish = () => {
      const wrong = done(field.value.trim());
      if (wrong) { note.className = "bad"; note.textContent = wrong; field.focus(); return; }
      note.className = "dim";
      show(field.value.trim());
      picker.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // the settings around it are neither kept nor closed
      event.stopPropagation();
      if (event.key === "Enter") finish(); else back();
    });
    replace(row, field, button(`${label} preset`, finish, { class: "main" }), button("Cancel", back));
    field.focus();
    field.select();
  }

  function save(name) {
    const list = presets(), wrong = trouble(name, system.value, list);
    if (wrong) return wrong;
    const others = list.filter((p) => p.name !== name);
    const said = others.length < list.length ? `“${name}” now has this prompt.` : `“${name}” is saved.`;
    note.textContent = said + keep([...others, { name, text: system.value }]);
    return null;
  }

  function rename(name) {
    const before = picker.value, list = presets(), own = list.find((p) => p.name === before);
    if (!own) return GONE;
    const wrong = trouble(name, own.text, list, before);
    if (wrong) return wrong;
    note.textContent = `“${before}” is now “${name}”.${keep(list.map((p) => (p.name === before ? { name, text: p.text } : p)))}`;
    return null;
  }

  async function remove() {
    const name = picker.value;
    if (!(await confirmed(`Delete the preset “${name}”?`, "The prompt itself stays in the conversations that use it.", "Delete"))) return;
    note.textContent = `“${name}” is deleted.${keep(presets().filter((p) => p.name !== name))}`;
    show("");
  }

  show();
  return el("div", {}, el("p", { class: "dim small", text: "Prompt preset" }), row, note);
}
