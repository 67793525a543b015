// Owns the playground: the conversation, its settings, and one answer at a time.
// Never keeps a conversation beyond the page.

const $ = (id) => document.getElementById(id);
const turns = [];  // what the next request carries
let running = null;  // the AbortController of the answer that comes

function requestBody(extra) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));  // what is unset is not sent
  const system = $("system").value.trim();
  return {
    model: modelName(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    ...extra,
  };
}

class Pace {
  constructor() { this.began = performance.now(); this.first = this.last = this.usage = this.id = null; }
  take(chunk) {
    this.id = chunk.id;
    this.usage = chunk.usage ?? this.usage;
    const { content, reasoning, tool_calls: calls } = chunk.choices[0]?.delta ?? {};
    if (!content && !reasoning && !calls) return;  // the first chunk only says whose turn it is, long before a token
    this.last = performance.now();
    this.first ??= this.last;
  }
  toString() {
    if (this.first === null) return "";
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage ?? {};
    const seconds = (this.last - this.first) / 1000, total = (this.last - this.began) / 1000;
    const told = [`first token after ${Math.round(this.first - this.began)} ms`];
    if (tokens > 1 && seconds > 0) told.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    told.push(`${total.toFixed(total < 10 ? 2 : 1)} s in all`);
    const cached = details?.cached_tokens ?? 0;
    if (tokens !== undefined) told.push(count(tokens, "token", "tokens"), `prompt of ${prompt}, ${cached} cached`);
    return told.join(" · ");
  }
}

async function answer({ signal }, extra) {
  const message = new Answer(modelName(), "response_format" in extra), pace = new Pace();
  const take = (chunk) => {
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.reasoning) message.think(delta.reasoning);
    if (delta.content) message.write(delta.content);
    pace.take(chunk);
  };
  try {
    await ask("v1/chat/completions", requestBody(extra), { signal, take });
    return message.text;
  } catch (error) {
    if (!signal.aborted) {
      message.note(error.message, true);
      ifRefused(error);
      return "";
    }
    message.note("Stopped.");
    return message.text;
  } finally {
    message.end(pace);
  }
}

/** Send a message. `extra`: more fields of the request, and `told` says so below the message. */
async function send(text = $("prompt").value, { extra = {}, told = "" } = {}) {
  if (running || !text.trim() || !$("composer").reportValidity()) return;
  const own = running = new AbortController();
  const may = await haveKey();
  if (running !== own) return;  // a new chat was begun meanwhile
  if (!may) {
    running = null;
    return;
  }
  showRunning(true);
  const question = new Question(text);
  if (told) question.note(told);
  turns.push({ role: "user", content: text });
  $("prompt").value = "";
  const said = await answer(own, extra);
  if (running !== own) return;
  running = null;
  showRunning(false);
  if (said) {
    turns.push({ role: "assistant", content: said });
  } else {  // nothing to go on from: it can be sent again
    turns.pop();
    $("prompt").value ||= text;
  }
}

function showRunning(is) {
  const had = document.activeElement === $("stop") || document.activeElement === $("send");
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (had) (is ? $("stop") : $("prompt")).focus();
}

function newChat() {
  running?.abort();
  running = null;
  showRunning(false);
  turns.length = 0;
  $("log").replaceChildren();
  $("prompt").focus();
}
