// Owns the playground: the conversation, its settings, and one answer at a time.
// Never writes what a model or a server says as markup.

const $ = (id) => document.getElementById(id);
const turns = [];  // what the next request carries
let running = null;  // the AbortController of the answer that comes

/** The key lives in its field and nowhere else. */
const apiKey = () => $("key").value.trim();

function askForKey(failure) {
  if (failure.status !== 401) return;
  $("key-field").hidden = false;
  $("key").focus();
}

function addMessage(role, text) {
  const item = $("message").content.firstElementChild.cloneNode(true);
  item.classList.add(role);
  item.querySelector("h3").textContent = { user: "You", assistant: $("model").textContent || "Model" }[role];
  const part = (name) => item.querySelector(`.${name}`);
  part("text").textContent = text;
  $("log").append(item);
  scrollLog(true);
  return {
    item,
    append: (name, more) => { part(name).hidden = false; part(name).append(more); scrollLog(false); },
    note: (told, bad) => {
      part("note").hidden = false;
      part("note").textContent = told;
      part("note").classList.toggle("bad", bad);
      scrollLog(true);
    },
    busy: (is) => item.setAttribute("aria-busy", is),  // so that an answer is read out once, when it is whole
    get text() { return part("text").textContent; },
  };
}

/** Follow what comes, unless somebody has scrolled up to read. */
function scrollLog(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function requestBody() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));  // what is unset is not sent
  const system = $("system").value.trim();
  return {
    model: $("model").textContent,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}

class Pace {
  constructor() { this.began = performance.now(); this.first = this.last = this.usage = this.id = null; }
  take(chunk) {
    this.id = chunk.id;
    this.usage = chunk.usage ?? this.usage;
    if (!chunk.choices.length) return;
    this.last = performance.now();
    this.first ??= this.last;
  }
  toString() {
    if (this.first === null) return "";
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage ?? {};
    const seconds = (this.last - this.first) / 1000;
    const told = [`first token after ${Math.round(this.first - this.began)} ms`];
    if (tokens > 1 && seconds > 0) told.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = details?.cached_tokens ?? 0;
    if (tokens !== undefined) told.push(count(tokens, "token", "tokens"), `prompt of ${prompt}, ${cached} cached`);
    return told.join(" · ");
  }
}

async function answer({ signal }) {
  const message = addMessage("assistant", ""), pace = new Pace();
  const take = (chunk) => {
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.reasoning) message.append("thought", delta.reasoning);
    if (delta.content) message.append("text", delta.content);
    pace.take(chunk);
  };
  message.busy(true);
  try {
    await ask("v1/chat/completions", requestBody(), { key: apiKey(), signal, take });
    return message.text;
  } catch (error) {
    if (!signal.aborted) {
      message.note(error.message, true);
      askForKey(error);
      return "";
    }
    message.note("Stopped.", false);
    return message.text;
  } finally {
    message.busy(false);
    $("stats").textContent = String(pace);
    if (pace.id) explain(pace.id, { again: true });
  }
}

async function send() {
  const text = $("prompt").value;
  if (running || !text.trim() || !$("composer").reportValidity()) return;
  const own = running = new AbortController();
  showRunning(true);
  addMessage("user", text);
  turns.push({ role: "user", content: text });
  $("prompt").value = "";
  const said = await answer(own);
  if (running !== own) return;  // a new chat was begun meanwhile
  running = null;
  showRunning(false);
  if (said && document.activeElement === $("key")) $("prompt").focus();  // the key was right
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
  $("stats").textContent = "";
  $("prompt").focus();
}
