// Owns the colours of code: comments, strings, numbers and the common keywords, found by one pass over the text.
// Never understands a language, and leaves the text of unknown ones alone.

const MOST_TINTED = 50000;  // characters of a block
const COMMENTS = { hash: "#[^\\n]*", slash: "//[^\\n]*|/\\*[^]*?(?:\\*/|$)", dash: "--[^\\n]*", none: "(?!)" };
const LANGUAGES = {
  hash: "python py bash sh shell zsh yaml yml toml ruby rb r perl dockerfile makefile make ini nix elixir",
  slash: "javascript js jsx typescript ts tsx java c h cpp c++ cc cs csharp go golang rust rs kotlin swift php scala dart css scss cuda proto json5 jsonc",
  dash: "sql lua haskell hs",
  none: "json",
};
const KEYWORDS = new Set(
  ("abstract and as assert async await auto begin bool boolean break by case catch char class const continue create def default defer del delete " +
  "do done double elif else end enum esac except export extends extern false fi final finally float fn for from func function " +
  "group if impl implements import in inner insert int interface into is join lambda left let limit local long match mod mut namespace new nil " +
  "none nonlocal not null of on or order package pass private protected pub public raise return select self set short signed " +
  "sizeof static struct super switch table template then this throw trait true try type typedef typename union unsigned update " +
  "use using values var virtual void where while with yield").split(" "),
);
const families = new Map(Object.entries(LANGUAGES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])));
const STRINGS = `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\[^])*\`?`;
const patterns = Object.fromEntries(Object.entries(COMMENTS).map(([family, comment]) =>
  [family, new RegExp(`(?<comment>${comment})|(?<string>${STRINGS})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g")]));

/** Give the text of a block of code as nodes. `language` is what stands behind the fence. */
function tinted(text, language) {
  const family = families.get(language.toLowerCase());
  if (!family || text.length > MOST_TINTED) return [text];
  const nodes = [];
  let end = 0;
  for (const { 0: found, index, groups } of text.matchAll(patterns[family])) {
    const kind = Object.keys(groups).find((name) => groups[name] !== undefined);
    if (kind === "word" && !KEYWORDS.has(found.toLowerCase())) continue;
    const span = document.createElement("span");
    span.className = kind === "word" ? "keyword" : kind;
    span.textContent = found;
    nodes.push(text.slice(end, index), span);
    end = index + found.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
