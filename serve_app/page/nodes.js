// Owns the nodes of an answer's Markdown: one for each of the lexer's tokens, and text for everything else.
// Never makes a node that fetches, runs or submits anything. Markup in an answer is text.

const SAFE = ["http:", "https:", "mailto:"];
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…",
  mdash: "—", ndash: "–", rarr: "→", larr: "←", times: "×", deg: "°", euro: "€", middot: "·", bull: "•",
};

function make(tag, children, name = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  for (const child of children) element.append(child);
  return element;
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/g, (all, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}

/** A link to another place, in a tab of its own that knows nothing of this one; without a safe address, its words. */
function link(href, children, title) {
  let url = null;
  try {
    url = new URL(decoded(href));
  } catch {
    return make("span", children);  // relative: there is no place that it would be relative to
  }
  if (!SAFE.includes(url.protocol)) return make("span", children);
  const element = make("a", children);
  element.href = url.href;
  element.rel = "noopener noreferrer nofollow";
  element.target = "_blank";
  if (title) element.title = title;
  return element;
}

function list(token) {
  const element = make(token.ordered ? "ol" : "ul", token.items.map((item) => make("li", nodesOf(item.tokens))));
  if (token.ordered && token.start !== 1) element.start = token.start;
  return element;
}

function table({ header, rows }) {
  const row = (tag) => (cells) => make("tr", cells.map((cell) => make(tag, nodesOf(cell.tokens), cell.align ?? "")));
  const parts = [make("thead", [header].map(row("th"))), make("tbody", rows.map(row("td")))];
  return make("div", [make("table", parts)], "wide");
}

/** `isWhole`: the block will not grow. Only then are its colours worth their price. */
function codeBlock({ text, lang }, isWhole) {
  const language = /^[\w+#.-]*/.exec(lang ?? "")[0];
  const code = make("code", isWhole ? tinted(text, language) : [text]);
  const bar = make("div", [make("span", [language || "code"]), copyButton("Copy", () => code.textContent)], "code-bar");
  const block = make("div", [bar, make("pre", [code])], "code");
  block.dataset.lang = lang ?? "";
  return block;
}

const NODES = {
  space: () => "",
  def: () => "",
  paragraph: ({ tokens }) => make("p", nodesOf(tokens)),
  heading: ({ depth, tokens }) => make(`h${Math.min(depth + 3, 6)}`, nodesOf(tokens), `depth-${depth}`),
  blockquote: ({ tokens }) => make("blockquote", nodesOf(tokens)),
  hr: () => make("hr", []),
  list,
  table,
  code: codeBlock,
  html: ({ raw, block }) => (block ? make("p", [raw.trimEnd()], "raw") : /^<br *\/?>$/i.test(raw) ? make("br", []) : raw),
  plain: ({ raw }) => make("p", [raw], "raw"),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  strong: ({ tokens }) => make("strong", nodesOf(tokens)),
  em: ({ tokens }) => make("em", nodesOf(tokens)),
  del: ({ tokens }) => make("del", nodesOf(tokens)),
  codespan: ({ text }) => make("code", [text]),
  br: () => make("br", []),
  link: ({ href, tokens, title }) => link(href, nodesOf(tokens), title),
  image: ({ href, text }) => link(href, [`image: ${text || href}`], ""),  // shown by its words, and never fetched
  escape: ({ text }) => text,
  text: ({ text, tokens }) => (tokens ? make("span", nodesOf(tokens)) : decoded(text)),
};

/** The nodes of the lexer's tokens; a kind that is not known is shown as it was written. */
function nodesOf(tokens, isWhole = true) {
  return tokens.map((token) => NODES[token.type]?.(token, isWhole) ?? token.raw);
}
