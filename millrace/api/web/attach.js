// Pictures and text files that go along with a message.

import { el, icon, sign, toast } from "./dom.js";
import { bytes } from "./format.js";

const MOST_TEXT = 1_000_000;
const LONG = 20_000; // characters of a pasted text that becomes a file
const LARGEST = 1568; // pixels of a side; larger pictures are made smaller before they are sent
const PICTURES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

/** What can be sent of these files; what cannot is told. */
export async function attachments(files, sees) {
  const found = [];
  for (const file of files) {
    try {
      found.push(PICTURES.has(file.type) ? await picture(file, sees) : await plain(file));
    } catch (error) {
      toast(`${file.name}: ${error.message}`, "bad");
    }
  }
  return found;
}

async function picture(file, sees) {
  if (!sees) throw new Error("this model does not see pictures.");
  const drawn = await createImageBitmap(file).catch(() => { throw new Error("this is no picture that can be read."); });
  const scale = Math.min(1, LARGEST / Math.max(drawn.width, drawn.height));
  if (scale === 1 && file.size < 2_000_000 && file.type !== "image/gif") return { kind: "picture", name: file.name, data: await dataOf(file) };
  const canvas = el("canvas", { width: Math.round(drawn.width * scale), height: Math.round(drawn.height * scale) });
  canvas.getContext("2d").drawImage(drawn, 0, 0, canvas.width, canvas.height);
  const made = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
  return { kind: "picture", name: file.name, data: await dataOf(made) };
}

function dataOf(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}

async function plain(file) {
  if (file.size > MOST_TEXT) throw new Error(`it has ${bytes(file.size)}; texts may have ${bytes(MOST_TEXT)}.`);
  const text = new TextDecoder("utf-8", { fatal: true });
  try {
    const found = text.decode(await file.arrayBuffer());
    if (found.includes("\0")) throw new Error();
    return { kind: "text", name: file.name, text: found };
  } catch {
    throw new Error("only texts and pictures (PNG, JPEG, WebP, GIF) can be sent.");
  }
}

/** A text that is too long to be written in, as a file; null if it is not. */
export const longText = (text) => (text.length > LONG ? new File([text], "pasted.txt", { type: "text/plain" }) : null);

export function shownFile(file, take) {
  const away = take && sign("close", `Take ${file.name} away`, take);
  if (file.kind === "picture") return el("div", { class: "file" }, el("img", { src: file.data, alt: file.name }), away);
  return el("div", { class: "file", title: file.name }, icon("clip"), el("span", { text: file.name }), el("span", { class: "dim", text: bytes(file.text.length) }), away);
}
