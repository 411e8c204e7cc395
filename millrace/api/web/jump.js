// The button that leads to the end of a conversation, there while the reader is elsewhere in it.

import { el, icon } from "./dom.js";

const NEAR = 80; // pixels from the end that count as being there

export const atEnd = (scroll) => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;

/** Put the button below a scrolled element; returns what is to be called when its content has changed. */
export function jumpToLatest(scroll) {
  const toEnd = () => { scroll.scrollTop = scroll.scrollHeight; };
  const button = el("button", { type: "button", class: "latest", hidden: true, on: { click: () => {
    toEnd();
    requestAnimationFrame(toEnd); // parts that were not drawn before have their true height only now
    scroll.focus({ preventScroll: true });
  } } }, icon("latest"), "Jump to latest");
  const look = () => { button.hidden = atEnd(scroll); };
  scroll.addEventListener("scroll", look, { passive: true });
  scroll.after(el("div", { class: "jump" }, button));
  return look;
}
