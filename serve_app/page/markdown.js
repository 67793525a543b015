// Owns an answer as it is read: Markdown that grows, lexed at most once a frame, and only where it can still change.
// Never lexes a finished block again, and never loses a character of what it cannot read.

const SMALL = 4096;  // characters of a block that is read again in every frame
const GROWTH = 8;  // a longer one is read again when it has grown by this part, so that the sum is linear
const MOST_INLINE = 4000;  // characters of a paragraph whose emphasis is looked for, which takes the square of them
const NESTED = /^(?:[ \t]*(?:>|[-+*](?= )|\d{1,9}[.)](?= ))){24}/m;  // deeper than anybody reads

const sizeOf = (tokens) => sum(tokens.map(({ raw }) => raw.length));

/** Lex, as the library's own `lex` does, but within bounds. `links` are the definitions that were read before. */
function tokensOf(text, links) {
  const plain = [{ type: "plain", raw: text }];
  if (NESTED.test(text)) return plain;
  const lexer = new marked.Lexer({ ...marked.getDefaults(), breaks: true });
  lexer.tokens.links = Object.assign(Object.create(null), links);  // one that is still being written does not count
  try {
    const tokens = lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens: into } of lexer.inlineQueue) {
      lexer.state.inRawBlock = false;
      if (src.length > MOST_INLINE) into.push({ type: "text", raw: src, text: src });
      else lexer.inlineTokens(src, into);
    }
    return sizeOf(tokens) === text.length ? tokens : plain;
  } catch {
    return plain;  // whatever a lexer makes of what a model may write, the answer is shown
  }
}

const INTO = "ul, ol, li, blockquote, p, .code, pre, pre > code, .wide, table, tbody, tr, td";

class Markdown {
  /** `opening`: Markdown before the answer, such as the fence of one that is code as a whole. */
  constructor(root, whenShown, opening) {
    this.root = root;
    this.whenShown = whenShown;
    this.opening = opening;
    this.source = "";  // all of the answer
    this.frame = 0;
    this.clear(opening);
  }

  clear(text) {
    this.root.replaceChildren();
    this.links = Object.create(null);
    this.tail = "";  // what was lexed of the block that may still change
    this.fresh = text;  // what was not lexed yet
    this.live = [];  // the nodes of that block
    this.spilt = null;
  }

  append(text) {
    const more = text.replaceAll("\r", "");
    this.source += more;
    this.fresh += more;
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.show(); });
  }

  /** Show all of it, now: nothing more comes. */
  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.lex(true);
    if (Object.keys(this.links).length) {  // a definition may stand behind what refers to it
      const links = this.links;
      this.clear(this.opening + this.source);
      this.links = links;
      this.lex(true);
    }
    this.whenShown();
  }

  show() {
    const length = this.tail.length + this.fresh.length;
    if (length > SMALL && this.fresh.length * GROWTH < length) this.spill();
    else this.lex(false);
    this.whenShown();
  }

  /** Show new text behind a long block as it is, until the block is read again. */
  spill() {
    if (!this.spilt) {
      let last = this.live.at(-1) ?? this.root;
      while (last.lastElementChild?.matches(INTO)) last = last.lastElementChild;
      last.append(this.spilt = new Text());
    }
    this.spilt.appendData(this.fresh.slice(this.spilt.length));
  }

  lex(isEnd) {
    const text = this.tail + this.fresh, tokens = tokensOf(text, this.links);
    const settled = isEnd ? tokens.length : settledOf(tokens);
    this.fresh = "";
    this.tail = text.slice(sizeOf(tokens.slice(0, settled)));  // by size: a lexer may have put in another kind of space
    for (const { type, tag, href, title } of tokens.slice(0, settled)) if (type === "def") this.links[tag] ??= { href, title };
    const has = !settled && this.grow(tokens);
    this.spilt = null;
    if (has) return;
    for (const node of this.live) node.remove();
    this.put(nodesOf(tokens.slice(0, settled)));
    this.live = this.put(nodesOf(tokens.slice(settled), false));
  }

  /** Code that grows keeps its node, and with it what is selected there. */
  grow(tokens) {
    const [token] = tokens, [node] = this.live, code = node?.querySelector(":scope > pre > code");
    if (tokens.length !== 1 || token.type !== "code" || !code || this.live.length !== 1) return false;
    const shown = code.textContent;
    if ((token.lang ?? "") !== node.dataset.lang || !token.text.startsWith(shown)) return false;
    code.lastChild.appendData(token.text.slice(shown.length));
    return true;
  }

  put(nodes) {
    const put = nodes.filter((node) => node !== "").map((node) => (typeof node === "string" ? make("p", [node]) : node));
    for (const node of put) this.root.append(node);
    return put;
  }
}

/** How many tokens more text cannot change: those before the last block of which a whole line is known. */
function settledOf(tokens) {
  const blocks = tokens.flatMap(({ type }, i) => (type === "space" ? [] : [i]));
  const last = blocks.at(-1) ?? 0;
  return tokens[last]?.raw.includes("\n") ? last : blocks.at(-2) ?? 0;
}
