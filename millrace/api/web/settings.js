// How a conversation is to be answered: system prompt, sampling, thinking, tools.

import { button, dialog, el } from "./dom.js";
import { toolsIn } from "./answer.js";
import { settings as known } from "./conversation.js";
import { forGood } from "./kept.js";

const DEFAULTS = "millrace-settings";
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 100, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: "any" }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];
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

/** Let somebody change the settings of a conversation; `changed` is called with them. */
export function openSettings(settings, changed) {
  const inputs = {};
  const field = (name, label, node) => {
    inputs[name] = node;
    return el("label", { class: "field" }, label, node);
  };
  const numbers = FIELDS.map(([name, label, bounds]) =>
    field(name, label, el("input", { type: "number", placeholder: "model's own", value: settings[name] ?? "", inputmode: "decimal", ...bounds })));
  const thinking = el("select", {}, ...[["", "the model's own way"], ["on", "on"], ["off", "off"]].map(([value, text]) => el("option", { value, text })));
  thinking.value = settings.thinking ?? "";
  const trouble = el("p", { class: "bad", role: "alert" });
  const form = el("form", { method: "dialog" },
    field("system", "System prompt", el("textarea", { rows: 4, value: settings.system ?? "", placeholder: "You are a helpful assistant." })),
    el("div", { class: "fields" }, ...numbers, field("thinking", "Thinking", thinking)),
    field("stop", "Stop texts, one a line", el("textarea", { rows: 2, value: settings.stop ?? "" })),
    field("tools", "Tools, as JSON; you answer their calls", el("textarea", { rows: 4, class: "mono", value: settings.tools ?? "", placeholder: EXAMPLE, spellcheck: "false" })),
    trouble,
    el("footer", { class: "row" },
      button("Clear", () => { for (const input of Object.values(inputs)) input.value = ""; }),
      el("span", { class: "grow" }),
      el("button", { class: "main", text: "Keep" })));
  form.addEventListener("submit", (event) => {
    try {
      if (inputs.tools.value.trim()) toolsIn(inputs.tools.value);
    } catch (error) {
      event.preventDefault();
      trouble.textContent = error.message;
      return;
    }
    const made = { model: settings.model };
    for (const [name, input] of Object.entries(inputs)) if (input.value.trim() !== "") made[name] = input.type === "number" ? Number(input.value) : input.value;
    changed(made);
  });
  dialog("How to answer", form);
  inputs.system.focus();
}
