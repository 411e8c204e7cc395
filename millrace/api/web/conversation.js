// A conversation as a tree: every edit and every new answer is a branch beside the old one. Pure data, which
// is stored, exported and imported as it is.

export const VERSION = 1;
const ROLES = new Set(["user", "assistant", "tool"]);

export const fresh = (prefix = "") => prefix + crypto.getRandomValues(new Uint32Array(3)).reduce((s, n) => s + n.toString(36), "");

export function begin(settings = {}) {
  const now = Date.now();
  return { version: VERSION, id: fresh("c"), title: "", created: now, updated: now, settings: { ...settings }, nodes: {}, root: { children: [], chosen: null } };
}

const holder = (talk, parent) => (parent ? talk.nodes[parent] : talk.root);

/** Add a message below another (null: at the start), and make it the one that is shown. */
export function add(talk, parent, message) {
  const node = { id: fresh("m"), parent, children: [], chosen: null, time: Date.now(), ...message };
  talk.nodes[node.id] = node;
  const above = holder(talk, parent);
  above.children.push(node.id);
  above.chosen = node.id;
  return node;
}

/** The messages that are shown, from the first on. */
export function path(talk) {
  const found = [];
  for (let at = talk.root.chosen; at; at = talk.nodes[at].chosen) found.push(talk.nodes[at]);
  return found;
}

/** The messages above one and itself. */
export function upTo(talk, id) {
  const found = [];
  for (let at = id; at; at = talk.nodes[at].parent) found.push(talk.nodes[at]);
  return found.reverse();
}

export function siblings(talk, node) {
  const all = holder(talk, node.parent).children;
  return { all, at: all.indexOf(node.id) };
}

/** Show the branch so many places further. */
export function turn(talk, node, by) {
  const { all, at } = siblings(talk, node);
  const next = all[(at + by + all.length) % all.length];
  holder(talk, node.parent).chosen = next;
  return talk.nodes[next];
}

/** Take into a conversation what another tab has added to it. Messages only ever grow, and are never taken away. */
export function join(talk, other) {
  if ((other.renamed ?? 0) > (talk.renamed ?? 0)) Object.assign(talk, { title: other.title, renamed: other.renamed });
  for (const [id, theirs] of Object.entries(other.nodes)) {
    const ours = talk.nodes[id];
    if (!ours) talk.nodes[id] = theirs;
    else if (weight(theirs) > weight(ours)) for (const name of ["content", "reasoning", "calls", "meta"]) ours[name] = theirs[name];
  }
  for (const theirs of [other.root, ...Object.values(other.nodes)]) {
    const ours = theirs.id ? talk.nodes[theirs.id] : talk.root;
    ours.children = [...new Set([...ours.children, ...theirs.children])];
    ours.chosen ??= theirs.chosen;
  }
}

const weight = (node) => node.content.length + (node.reasoning?.length ?? 0) + JSON.stringify(node.calls ?? []).length + (node.meta?.finish ? 1 : 0);

/** What the server is sent, as chat completions have it. */
export function messages(talk, id) {
  const found = [];
  if (talk.settings.system?.trim()) found.push({ role: "system", content: talk.settings.system });
  for (const node of upTo(talk, id)) {
    if (node.role === "assistant") {
      const said = { role: "assistant", content: node.content || (node.calls?.length ? null : "") };
      if (node.reasoning) said.reasoning_content = node.reasoning;
      if (node.calls?.length) {
        said.tool_calls = node.calls.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.arguments || "{}" } }));
      }
      found.push(said);
    } else if (node.role === "tool") found.push({ role: "tool", tool_call_id: node.call, content: node.content });
    else found.push({ role: "user", content: spoken(node) });
  }
  return found;
}

/** A user's words with what was attached: files as text before them, pictures as parts. */
function spoken(node) {
  const files = (node.attachments ?? []).filter((a) => a.kind === "text");
  const pictures = (node.attachments ?? []).filter((a) => a.kind === "picture");
  const text = [...files.map(fenced), node.content].filter(Boolean).join("\n\n");
  if (!pictures.length) return text;
  return [...pictures.map((p) => ({ type: "image_url", image_url: { url: p.data } })), { type: "text", text }];
}

function fenced({ name, text }) {
  const longest = (text.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}`;
}

/** All that was said, for a search. */
export const wording = (talk) => [talk.title, ...Object.values(talk.nodes).map((n) => `${n.content} ${n.reasoning ?? ""}`)].join("\n");

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/[#*`>_]/g, "").trim();
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The shown branch as Markdown. */
export function asMarkdown(talk) {
  const parts = [`# ${talk.title || "Conversation"}`];
  if (talk.settings.system) parts.push(`> ${talk.settings.system.replaceAll("\n", "\n> ")}`);
  for (const node of path(talk)) {
    const who = { user: "You", assistant: node.meta?.model ?? "Assistant", tool: "Tool" }[node.role];
    const calls = (node.calls ?? []).map((c) => `\`${c.name}(${c.arguments})\``);
    const files = (node.attachments ?? []).map((a) => `*${a.name}*`);
    parts.push(`**${who}**\n\n${[...files, node.content, ...calls].filter(Boolean).join("\n\n")}`);
  }
  return `${parts.join("\n\n")}\n`;
}

const text = (value, most = 10_000_000) => (typeof value === "string" ? value.slice(0, most) : "");
/** What the server accepts for each number; `above` is for a least value that is not itself accepted. */
export const RANGES = {
  temperature: { min: 0, max: 100 },
  top_p: { min: 0, above: true, max: 1 },
  top_k: { min: -1, max: Number.MAX_SAFE_INTEGER, whole: true },
  min_p: { min: 0, max: 1 },
  max_tokens: { min: 1, max: Number.MAX_SAFE_INTEGER, whole: true },
  seed: { min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, whole: true },
  repetition_penalty: { min: 0.01, max: 100 },
};
export const NUMBERS = Object.keys(RANGES);

/** Whether the server accepts a value for one of the numbers. */
export function inRange(name, value) {
  const { min, max, above, whole } = RANGES[name];
  return Number.isFinite(value) && value <= max && (above ? value > min : value >= min) && (!whole || Number.isInteger(value));
}

const WORDS = ["model", "system", "thinking", "stop", "tools"];
const FIGURES = ["ttft", "rate", "seconds", "thought", "prompt", "generated", "cached", "limit"];
const picture = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/;

/** A conversation from a file, of which nothing is taken that is not known; throws what is wrong. */
export function checked(data) {
  if (!data || typeof data !== "object" || data.version !== VERSION || typeof data.nodes !== "object" || !data.nodes) {
    throw new Error("the file is not a millrace chat");
  }
  const talk = begin();
  talk.title = text(data.title, 200);
  for (const name of ["created", "updated", "renamed"]) if (Number.isFinite(data[name])) talk[name] = data[name];
  talk.settings = settings(data.settings);
  const names = new Map(), known = Object.entries(data.nodes).slice(0, 100_000);
  for (const [id] of known) names.set(id, fresh("m"));
  for (const [id, node] of known) {
    if (!ROLES.has(node?.role)) throw new Error("a message has an unknown role");
    talk.nodes[names.get(id)] = {
      id: names.get(id), parent: names.get(node.parent) ?? null, children: [], chosen: null, role: node.role,
      time: Number.isFinite(node.time) ? node.time : 0, content: text(node.content), reasoning: text(node.reasoning),
      call: text(node.call, 200), calls: calls(node.calls), attachments: attachments(node.attachments), meta: meta(node.meta),
    };
  }
  for (const [id, node] of [["", data.root], ...known]) {
    const here = id ? talk.nodes[names.get(id)] : talk.root;
    for (const child of Array.isArray(node?.children) ? node.children : []) {
      const found = talk.nodes[names.get(child)];
      if (found && !found.placed && found !== here && (found.parent ?? "") === (here.id ?? "")) {
        found.placed = true;
        here.children.push(found.id);
      }
    }
    here.chosen = here.children.includes(names.get(node?.chosen)) ? names.get(node.chosen) : (here.children.at(-1) ?? null);
  }
  prune(talk);
  return talk;
}

/** Only what can be reached from the start is kept. */
function prune(talk) {
  const reached = new Set(), left = [...talk.root.children];
  while (left.length) {
    const id = left.pop();
    if (reached.has(id)) continue;
    reached.add(id);
    left.push(...talk.nodes[id].children);
  }
  for (const id of Object.keys(talk.nodes)) {
    delete talk.nodes[id].placed;
    if (!reached.has(id)) delete talk.nodes[id];
  }
}

const calls = (given) => (Array.isArray(given) ? given : []).slice(0, 200)
  .map((c) => ({ id: text(c?.id, 200), name: text(c?.name, 200), arguments: text(c?.arguments) }));

const attachments = (given) => (Array.isArray(given) ? given : []).slice(0, 64).flatMap((a) => {
  if (a?.kind === "text") return [{ kind: "text", name: text(a.name, 200), text: text(a.text) }];
  if (a?.kind === "picture" && picture.test(a.data ?? "")) return [{ kind: "picture", name: text(a.name, 200), data: a.data }];
  return [];
});

/** Of settings from anywhere, those that are known and of the right kind. */
export function settings(given) {
  const found = {};
  for (const name of WORDS) if (typeof given?.[name] === "string") found[name] = given[name];
  for (const name of NUMBERS) if (inRange(name, given?.[name])) found[name] = given[name];
  return found;
}

function meta(given) {
  const found = {};
  for (const name of FIGURES) if (Number.isFinite(given?.[name])) found[name] = given[name];
  for (const name of ["model", "finish", "error"]) if (typeof given?.[name] === "string") found[name] = given[name].slice(0, 500);
  for (const name of ["stopped", "edited", "looped"]) if (given?.[name] === true) found[name] = true;
  return found;
}
