// The first visit: that the built-in model is for trying things out, and which one to fetch instead.

import { get } from "./api.js";
import { button, el, replace } from "./dom.js";
import { bytes } from "./format.js";
import { fetchModel, fetchOf, onFetch, showFetch } from "./pulls.js";
import { refreshRole, server } from "./server.js";

/** A note about the model that is served, or null where somebody chose it. `use` is called with a model's name. */
export async function welcome(use) {
  const [library] = await Promise.all([get("/v1/library"), refreshRole()]);
  if (!library.builtin) return null;
  const builtin = library.models.find((m) => m.named)?.name ?? "";
  const best = library.recommended;
  const offer = el("div", { class: "list" }), progress = el("div", { class: "list" });
  const root = el("section", { class: "card welcome", "aria-label": "About the model" },
    el("p", {}, el("b", { text: builtin }), " is the small built-in model, for trying things out. Its answers are often wrong."), offer, progress);
  const others = el("a", { href: "#models", text: "Other models" });
  const row = library.suggested.find((s) => s.source === best?.source);

  function show() {
    const state = best && showFetch(progress, best.source, button(`Use ${best.name}`, () => use(best.source), { class: "main" }));
    if (!best) {
      replace(offer, el("p", { text: "None of the better models that are known here fits this machine's memory." }), el("p", {}, others));
    } else if (server.refused || library.fetchable === false) {
      const why = server.refused ?? "This server serves the models it was started with and no others (--only).";
      replace(offer, el("p", {}, "A better one for this machine is ", el("b", { text: best.name }), ` (${bytes(best.bytes)}).`), el("p", { class: "dim", text: why }));
    } else if (state && !state.error) {
      replace(offer);
    } else {
      const here = row?.installed;
      replace(offer, el("p", {}, "The best one that fits this machine is ", el("b", { text: best.name }), here ? ", which is here already." : `: ${bytes(best.bytes)} to fetch.`),
        row?.fit_reason && el("p", { class: "dim", text: row.fit_reason }),
        el("div", { class: "row" }, here ? button(`Use ${best.name}`, () => use(best.source), { class: "main" }) : button(`Fetch ${best.name}`, () => fetchModel(best.source, best.name), { class: "main" }), others));
    }
  }

  onFetch(show);
  show();
  /** It is about the built-in model: there is no need of it while another is chosen. */
  root.about = (model) => { root.hidden = model !== builtin && (!best || (fetchOf(best.source)?.over ?? true)); };
  return root;
}
