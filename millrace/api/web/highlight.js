// Colours for code, line by line and in one pass: a scanner that knows comments, strings, numbers and words.
// It need not be right about every language; it must never be slow.

const words = (text) => new Set(text.trim().split(/\s+/));
const C = "break case const continue default do else enum extern for goto if register return sizeof static struct switch typedef union void volatile while";
const TYPES = words(`int long short char float double bool boolean byte string String str void unsigned signed size_t auto
  u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 usize isize int8 int16 int32 int64 uint uint8 uint32 uint64 float32 float64
  number any unknown never object Array List Dict Map Set Vec Option Result Box dict list set tuple bytes None Self self this`);
const ATOMS = words("true false null None True False nil undefined NaN Infinity nullptr");
const slashes = { line: ["//"], block: ["/*", "*/"] };
const quotes = { strings: ['"', "'"] };

const LANGUAGES = {
  c: { ...slashes, ...quotes, words: words(`${C} inline namespace class public private protected virtual override template typename using new delete try catch throw constexpr noexcept operator friend explicit mutable #include #define #ifdef #ifndef #endif #if #else #pragma`), hash: true },
  java: { ...slashes, ...quotes, words: words(`${C} abstract class extends final finally implements import instanceof interface new package private protected public super synchronized this throw throws try catch var record sealed permits yield namespace using internal readonly async await override virtual sealed get set value partial where is as in out ref base fun val when object companion data init lateinit by suspend guard func let protocol extension`), at: true },
  js: { ...slashes, strings: ['"', "'"], long: ["`"], words: words(`${C} async await catch class debugger delete export extends finally from function get import in instanceof interface implements let new of private public protected readonly set super this throw try type typeof var with yield as namespace declare keyof satisfies abstract`) },
  go: { ...slashes, strings: ['"', "'"], long: ["`"], words: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var") },
  rust: { ...slashes, strings: ['"'], words: words("as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return static struct super trait type unsafe use where while macro_rules"), },
  python: { line: ["#"], strings: ['"', "'"], long: ['"""', "'''"], words: words("and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield"), at: true },
  ruby: { line: ["#"], ...quotes, words: words("alias and begin break case class def defined? do else elsif end ensure for if in module next nil not or redo rescue retry return self super then undef unless until when while yield require attr_accessor puts") },
  shell: { line: ["#"], strings: ['"', "'"], words: words("if then else elif fi for in do done while until case esac function return local export source alias echo cd sudo set unset exit read declare trap curl pip npm git docker FROM RUN COPY CMD ENTRYPOINT WORKDIR ENV EXPOSE ARG"), dollar: true },
  sql: { line: ["--"], block: ["/*", "*/"], strings: ["'", '"'], folds: true, words: words("select from where and or not in is null insert into values update set delete create table index view drop alter add column primary key foreign references join left right inner outer full on group by order having limit offset union all distinct as case when then else end with exists between like asc desc count sum avg min max begin commit rollback default unique constraint returning over partition") },
  css: { block: ["/*", "*/"], ...quotes, words: words("@media @import @font-face @keyframes @supports @layer !important"), dash: true },
  json: { line: ["//"], strings: ['"'], words: new Set(), keys: true },
  yaml: { line: ["#"], ...quotes, words: words("yes no on off"), keys: true, dash: true },
  toml: { line: ["#", ";"], ...quotes, long: ['"""'], words: new Set(), keys: true, dash: true },
  lua: { line: ["--"], ...quotes, words: words("and break do else elseif end for function goto if in local not or repeat return then until while") },
  haskell: { line: ["--"], strings: ['"'], words: words("case class data deriving do else if import in infix infixl infixr instance let module newtype of then type where qualified as hiding") },
  markup: { markup: true },
  diff: { diff: true },
};
const NAMES = {
  "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", objc: "c", cuda: "c", metal: "c", glsl: "c", csharp: "java", cs: "java",
  kotlin: "java", kt: "java", swift: "java", scala: "java", dart: "java", php: "js", groovy: "java", javascript: "js", jsx: "js",
  ts: "js", tsx: "js", typescript: "js", mjs: "js", golang: "go", rs: "rust", zig: "rust", py: "python", python3: "python",
  ipython: "python", mojo: "python", rb: "ruby", elixir: "ruby", perl: "ruby", r: "python", julia: "python", bash: "shell", sh: "shell",
  zsh: "shell", fish: "shell", console: "shell", powershell: "shell", dockerfile: "shell", docker: "shell", makefile: "shell", make: "shell",
  cmake: "shell", mysql: "sql", postgresql: "sql", sqlite: "sql", scss: "css", less: "css", json5: "json", jsonc: "json", jsonl: "json",
  yml: "yaml", ini: "toml", conf: "toml", env: "toml", properties: "toml", html: "markup", xml: "markup", svg: "markup", vue: "markup",
  svelte: "markup", patch: "diff", nginx: "shell", hs: "haskell", elm: "haskell",
};
const WORD = /[\p{L}_][\p{L}\p{N}_]*[!?]?/uy;
const NUMBER = /0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?[a-zA-Z%]{0,3}/y;
const LONGEST = 2000; // characters of a line that is looked at

/** A function from a line to pairs of class and text, which remembers where it is; null for plain text. */
export function highlighter(lang) {
  const language = LANGUAGES[NAMES[lang] ?? lang];
  if (!language) return null;
  if (language.diff) return (line) => [[line[0] === "+" ? "added" : line[0] === "-" ? "gone" : line[0] === "@" ? "keyword" : "", line]];
  const state = { until: null, kind: "" };
  return (line) => {
    if (line.length > LONGEST) return [["", line]];
    return merged(language.markup ? markup(line, state) : scan(line, language, state));
  };
}

function merged(pairs) {
  const found = [];
  for (const [kind, text] of pairs) {
    if (!text) continue;
    if (found.length && found.at(-1)[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  }
  return found;
}

/** The end of what goes on over lines, or of a string; -1 if it is not on this line. */
function closing(line, mark, from) {
  for (let at = from; at < line.length; at++) {
    if (line[at] === "\\" && mark !== "*/" && mark !== "-->") at++;
    else if (line.startsWith(mark, at)) return at + mark.length;
  }
  return -1;
}

function scan(line, language, state) {
  const out = [];
  let at = 0;
  const over = (mark, kind, from) => {
    const end = closing(line, mark, from);
    out.push([kind, line.slice(at, end < 0 ? line.length : end)]);
    state.until = end < 0 ? mark : null;
    state.kind = kind;
    at = end < 0 ? line.length : end;
  };
  if (state.until) over(state.until, state.kind, 0);
  while (at < line.length) {
    const c = line[at];
    const comment = language.line?.find((mark) => line.startsWith(mark, at));
    if (comment && !(comment === "#" && language.dollar && at && !/[\s;]/.test(line[at - 1]))) { out.push(["comment", line.slice(at)]); break; }
    if (language.block && line.startsWith(language.block[0], at)) { over(language.block[1], "comment", at + language.block[0].length); continue; }
    const long = language.long?.find((mark) => line.startsWith(mark, at));
    if (long) { over(long, "string", at + long.length); continue; }
    if (language.strings?.includes(c)) {
      const end = closing(line, c, at + 1), stop = end < 0 ? line.length : end;
      const isKey = language.keys && /^\s*:/.test(line.slice(stop, stop + 20));
      out.push([isKey ? "name" : "string", line.slice(at, stop)]);
      at = stop;
      continue;
    }
    if (/[0-9]/.test(c) && !(language.dollar && at && !/[\s=(]/.test(line[at - 1]))) {
      NUMBER.lastIndex = at;
      const found = NUMBER.exec(line)[0];
      out.push(["number", found]);
      at += found.length;
      continue;
    }
    if (/[\p{L}_]/u.test(c) || ((c === "@" || c === "#" || c === "$") && /[\p{L}_]/u.test(line[at + 1] ?? ""))) {
      WORD.lastIndex = /[@#$]/.test(c) ? at + 1 : at;
      let found = line.slice(at, WORD.lastIndex) + (WORD.exec(line)?.[0] ?? "");
      if (!found) { out.push(["", c]); at++; continue; }
      if (language.dash) while (/[-\w]/.test(line[at + found.length] ?? "")) found += line[at + found.length];
      out.push([kindOf(found, line, at + found.length, language), found]);
      at += found.length;
      continue;
    }
    out.push(["", c]);
    at++;
  }
  return out;
}

function kindOf(word, line, after, language) {
  if (language.words.has(language.folds ? word.toLowerCase() : word)) return "keyword";
  if (ATOMS.has(word)) return "number";
  if (language.keys && /[:=]/.test(line.slice(after).trimStart()[0] ?? "")) return "name";
  if (word[0] === "@" && language.at) return "name";
  if (word[0] === "$" && language.dollar) return "name";
  if (TYPES.has(word)) return "type";
  if (line[after] === "(") return "name";
  return /^[A-Z][a-z]/.test(word) && !language.keys ? "type" : "";
}

function markup(line, state) {
  const out = [];
  let at = 0;
  while (at < line.length) {
    if (state.until) {
      const end = closing(line, state.until, at), stop = end < 0 ? line.length : end;
      if (state.kind === "tag") out.push(...inTag(line.slice(at, stop)));
      else out.push(["comment", line.slice(at, stop)]);
      if (end >= 0) state.until = null;
      at = stop;
      continue;
    }
    const open = line.indexOf("<", at);
    out.push(["", line.slice(at, open < 0 ? line.length : open)]);
    if (open < 0) break;
    at = open;
    if (line.startsWith("<!--", at)) [state.until, state.kind] = ["-->", "comment"];
    else if (/[a-zA-Z/!?]/.test(line[at + 1] ?? "")) [state.until, state.kind] = [">", "tag"];
    else { out.push(["", "<"]); at++; }
  }
  return out;
}

function inTag(text) {
  return (text.match(/"[^"]*"?|'[^']*'?|[^"']+/g) ?? []).map((part, i) => [/^["']/.test(part) ? "string" : i === 0 ? "keyword" : "name", part]);
}
