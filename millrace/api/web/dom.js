// Making elements. Text is only ever text here: nothing that was said becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `props` are attributes, except `on` (listeners), `text` and `data`. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, heard] of Object.entries(value)) node.addEventListener(event, heard);
    else if (name === "text") node.textContent = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PATHS = {
  plus: "M8 3v10M3 8h10",
  send: "M8 13V3M4 7l4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
  copy: "M6 6h7v7H6zM3 10V3h7",
  check: "M3 8.5l3.5 3.5L13 5",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5v3h-3",
  latest: "M8 3v10M4 9l4 4 4-4",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5",
  clip: "M12.5 7.5L8 12a2.8 2.8 0 0 1-4-4l5-5a1.9 1.9 0 0 1 2.7 2.7l-5 5a1 1 0 0 1-1.4-1.4L9.8 4.8",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  tune: "M3 5h6M12 5h1M3 11h1M7 11h6M9 3.5h3v3H9zM4 9.5h3v3H4z",
  down: "M8 3v8M4.5 8L8 11.5 11.5 8M3 13.5h10",
  up: "M8 11V3M4.5 6.5L8 3l3.5 3.5M3 13.5h10",
  close: "M4 4l8 8M12 4l-8 8",
  key: "M6 10a3 3 0 1 1 1.8-1L13 14M10.5 11.5L12 10",
  pin: "M6 3h4l-.6 4.2L11.5 9h-7l2.1-1.8zM8 9v4.5",
  sun: "M8 5.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6zM8 1.5v1.6M8 12.9v1.6M1.5 8h1.6M12.9 8h1.6M3.4 3.4l1.1 1.1M11.5 11.5l1.1 1.1M12.6 3.4l-1.1 1.1M4.5 11.5l-1.1 1.1",
  tool: "M10.2 3a3 3 0 0 0-3.6 3.9L2.8 10.7a1.5 1.5 0 0 0 2.1 2.1l3.9-3.8A3 3 0 0 0 12.8 5.4L11 7.2 8.8 5z",
};

export function icon(name) {
  const path = svg("path", { d: PATHS[name] });
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, path);
}

/** A button with a sign, whose words are for screen readers and for a pointer that rests. */
export function sign(name, label, click, more = {}) {
  return el("button", { type: "button", class: "sign", "aria-label": label, title: label, on: { click }, ...more }, icon(name));
}

export function button(label, click, more = {}) {
  return el("button", { type: "button", text: label, on: { click }, ...more });
}

export function replace(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A bar that is filled to some share; `show` sets it, and turns it into a warning when little is left. */
export function gauge(label) {
  const filled = el("i"), root = el("div", { class: "gauge", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100" }, filled);
  root.show = (share) => {
    const percent = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
    root.setAttribute("aria-valuenow", percent);
    filled.style.width = `${percent}%`;
    filled.className = percent > 95 ? "full" : percent > 80 ? "high" : "";
    return root;
  };
  return root.show(0);
}

/** Say something to screen readers, without showing it. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}

/** Show a line for some seconds, between the header and the view: it takes room of its own and covers nothing. */
export function toast(text, kind = "") {
  const open = [...document.querySelectorAll("dialog[open]")].at(-1); // what is behind a dialog is not seen
  const place = open?.querySelector(".toasts") ?? document.getElementById("toasts");
  for (const shown of place.children) if (shown.textContent === text) shown.remove();
  const note = el("div", { class: `toast ${kind}` }, el("span", { text }), sign("close", "Dismiss", () => note.remove()));
  place.append(note);
  announce(text);
  setTimeout(() => note.remove(), kind === "bad" ? 9000 : 4000);
}

export async function copied(text, sign) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "offstage", value: text }); // pages without TLS have no clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied.");
  const before = [...sign.childNodes];
  replace(sign, icon("check"));
  setTimeout(() => replace(sign, ...before), 1200);
}

/** A dialog of the browser's own: it keeps the focus, and Escape closes it. */
export function dialog(title, ...children) {
  const close = sign("close", "Close", () => box.close());
  const toasts = el("div", { class: "toasts" });
  const box = el("dialog", { "aria-label": title, on: { close: () => { document.getElementById("toasts").append(...toasts.children); box.remove(); } } },
    el("header", {}, el("h2", { text: title }), close), toasts, ...children);
  box.addEventListener("click", (event) => event.target === box && box.close());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Ask before what cannot be undone. */
export function confirmed(title, text, yes) {
  return new Promise((answer) => {
    const box = dialog(title, el("p", { text }), el("footer", {},
      button("Cancel", () => box.close()),
      button(yes, () => { answer(true); box.close(); }, { class: "danger" })));
    box.addEventListener("close", () => answer(false));
  });
}
