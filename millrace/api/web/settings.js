// The settings of a conversation: system prompt, sampling, thinking, tools.

import { button, dialog, el } from "./dom.js";
import { toolsIn } from "./answer.js";
import { inRange, RANGES, settings as known } from "./conversation.js";
import { count } from "./format.js";
import { forGood } from "./kept.js";
import { MAX_TOKENS } from "./limits.js";
import { presetRow } from "./presets.js";

const DEFAULTS = "millrace-settings";
const LABELS = {
  temperature: "Temperature", top_p: "Top P", top_k: "Top K", min_p: "Min P", repetition_penalty: "Repetition penalty", max_tokens: "Max tokens", seed: "Seed",
};
const MOST_STOPS = 64, LONGEST_STOP = 4096;
const EXAMPLE = '[{"name": "weather", "description": "The weather at a place", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}]';

/** What new conversations begin with. */
export function defaults() {
  try {
    return known(JSON.parse(forGood.get(DEFAULTS) ?? "{}"));
  } catch {
    return {};
  }
}

export function remember(settings) {
  forGood.set(DEFAULTS, JSON.stringify(settings));
}

/** The value that holds where none is set, for a model's card. */
function placeholder(name, model) {
  if (name === "seed") return "random";
  const value = model?.default_sampling_params?.[name] ?? (name === "max_tokens" ? MAX_TOKENS : undefined);
  return value === undefined || value === null ? "default" : name === "max_tokens" ? count(value) : String(value);
}

/** What is wrong with a number as it was typed; null if nothing is. */
function numberProblem(name, input) {
  if (input.value.trim() === "" && !input.validity.badInput) return null;
  if (inRange(name, input.validity.badInput ? NaN : Number(input.value))) return null;
  const { min, max, above, whole } = RANGES[name], kind = whole ? "a whole number" : "a number";
  if (name === "seed") return `${LABELS[name]} must be ${kind} of at most 15 digits.`;
  if (max === Number.MAX_SAFE_INTEGER) return `${LABELS[name]} must be ${kind}, ${min} or more.`;
  return `${LABELS[name]} must be ${kind} ${above ? `above ${min} and at most ${max}` : `from ${min} to ${max}`}.`;
}

function stopProblem(text) {
  const lines = text.split("\n").filter(Boolean);
  if (lines.length > MOST_STOPS) return `There may be at most ${MOST_STOPS} stop sequences.`;
  return lines.some((line) => line.length > LONGEST_STOP) ? `A stop sequence may have at most ${count(LONGEST_STOP)} characters.` : null;
}

function toolsProblem(text) {
  try { if (text.trim()) toolsIn(text); } catch (error) { return error.message; }
  return null;
}

/** Let somebody change the settings of a conversation; `changed` is called with them. `model` is the chosen one's card. */
export function openSettings(settings, changed, model = null) {
  const inputs = {}, errors = {};
  const field = (name, label, node) => {
    inputs[name] = node;
    errors[name] = el("small", { class: "bad", role: "alert", id: `problem-${name}`, hidden: true });
    node.setAttribute("aria-label", label); // the sentence beside it describes the field and is not part of its name
    node.setAttribute("aria-describedby", errors[name].id);
    // What is wrong is marked when it is to be saved: a sentence that appears as a field is left would move the button from under the pointer.
    node.addEventListener("input", () => node.hasAttribute("aria-invalid") && check(name));
    return el("label", { class: "field" }, label, node, errors[name]);
  };
  const problemOf = (name) => (name in RANGES ? numberProblem(name, inputs[name]) : name === "stop" ? stopProblem(inputs.stop.value) : name === "tools" ? toolsProblem(inputs.tools.value) : null);
  /** Mark a field whose value is not accepted, with a sentence; whether it is accepted. */
  const check = (name) => {
    const problem = problemOf(name);
    errors[name].hidden = !problem;
    errors[name].textContent = problem ?? "";
    if (problem) inputs[name].setAttribute("aria-invalid", "true"); else inputs[name].removeAttribute("aria-invalid");
    return !problem;
  };
  const numbers = Object.entries(LABELS).map(([name, label]) =>
    field(name, label, el("input", { type: "number", placeholder: placeholder(name, model), value: settings[name] ?? "", step: "any", inputmode: "decimal" })));
  const thinking = el("select", {}, ...[["", "Default"], ["on", "On"], ["off", "Off"]].map(([value, text]) => el("option", { value, text })));
  thinking.value = settings.thinking ?? "";
  const system = el("textarea", { rows: 4, value: settings.system ?? "", placeholder: "You are a helpful assistant." });
  const form = el("form", { method: "dialog", novalidate: true },
    presetRow(system),
    field("system", "System prompt", system),
    el("div", { class: "fields" }, ...numbers, field("thinking", "Thinking", thinking)),
    field("stop", "Stop sequences, one per line", el("textarea", { rows: 2, value: settings.stop ?? "" })),
    field("tools", "Tools (JSON); you enter their results", el("textarea", { rows: 4, class: "mono", value: settings.tools ?? "", placeholder: EXAMPLE, spellcheck: "false" })),
    el("footer", { class: "row" },
      button("Reset to defaults", () => { for (const [name, input] of Object.entries(inputs)) { input.value = ""; check(name); } }),
      el("span", { class: "grow" }),
      el("button", { class: "main", text: "Save" })));
  form.addEventListener("submit", (event) => {
    const wrong = Object.keys(inputs).filter((name) => !check(name));
    if (wrong.length) {
      event.preventDefault();
      inputs[wrong[0]].focus();
      return;
    }
    const made = { model: settings.model };
    for (const [name, input] of Object.entries(inputs)) if (input.value.trim() !== "") made[name] = input.type === "number" ? Number(input.value) : input.value;
    changed(made);
  });
  dialog("Settings", form);
  inputs.system.focus();
}
