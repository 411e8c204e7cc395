// Pictures, text files and the text of PDFs that go along with a message.

import { post } from "./api.js";
import { el, icon, sign, toast } from "./dom.js";
import { bytes, count } from "./format.js";

const MOST_TEXT = 1_000_000;
const MOST_PDF = 20 * 1024 * 1024; // as the server takes them
const LONG = 20_000; // characters of a pasted text that becomes a file
const LARGEST = 1568; // pixels of a side; larger pictures are made smaller before they are sent
const PICTURES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

/** What can be sent of these files; what cannot is told. */
export async function attachments(files, sees) {
  const found = [];
  for (const file of files) {
    try {
      found.push(PICTURES.has(file.type) ? await picture(file, sees) : isPdf(file) ? await textOfPdf(file) : await plain(file));
    } catch (error) {
      toast(`${file.name}: ${error.message}`, "bad");
    }
  }
  return found;
}

async function picture(file, sees) {
  if (!sees) throw new Error("this model does not support images.");
  const drawn = await createImageBitmap(file).catch(() => { throw new Error("this image cannot be read."); });
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

const isPdf = (file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

/** A PDF's text, which the server reads; nothing of it is kept there. */
async function textOfPdf(file) {
  if (file.size > MOST_PDF) throw new Error(`it has ${bytes(file.size)}; PDFs may have ${bytes(MOST_PDF)}.`);
  const read = await post("/v1/files/text", { filename: file.name, file_data: await dataOf(file) });
  const part = read.pages_read < read.pages ? `the text of ${count(read.pages_read)} of its ${count(read.pages)} pages is` : `the first ${count(read.text.length)} characters of its text are`;
  if (read.truncated) toast(`${file.name} is long: ${part} sent.`);
  return { kind: "text", name: file.name, text: read.text };
}

async function plain(file) {
  if (file.size > MOST_TEXT) throw new Error(`${bytes(file.size)} is too large; text files may have up to ${bytes(MOST_TEXT)}.`);
  const text = new TextDecoder("utf-8", { fatal: true });
  try {
    const found = text.decode(await file.arrayBuffer());
    if (found.includes("\0")) throw new Error();
    return { kind: "text", name: file.name, text: found };
  } catch {
    throw new Error("only text files, PDFs and images (PNG, JPEG, WebP, GIF) can be attached.");
  }
}

/** A text that is too long to be written in, as a file; null if it is not. */
export const longText = (text) => (text.length > LONG ? new File([text], "pasted.txt", { type: "text/plain" }) : null);

/** A file that is being made ready. */
export const readFile = (file) => el("div", { class: "file", title: file.name }, icon("clip"), el("span", { text: file.name }), el("span", { class: "dim waits", role: "status", text: "reading" }));

export function shownFile(file, take) {
  const away = take && sign("close", `Remove ${file.name}`, take);
  if (file.kind === "picture") return el("div", { class: "file" }, el("img", { src: file.data, alt: file.name }), away);
  return el("div", { class: "file", title: file.name }, icon("clip"), el("span", { text: file.name }), el("span", { class: "dim", text: bytes(file.text.length) }), away);
}
