// Owns the demonstration: a few streams, one long prompt beside them, and what that cost the streams.
// Never sends more than this, nor runs for longer than a minute.

const STREAMS = 4, STREAM_TOKENS = 160, PROMPT_TOKENS = 1500, HEAD_START_MS = 1500, LONGEST_LOAD_MS = 60000;
let loading = null;

/** Text that no prefix cache has seen, and longer than the tokens that are kept of it. */
function longText(name) {
  return Array.from({ length: 400 }, (_, i) => `${i}, ${name}: the keeper lit the lamp. `).join("");
}

/** Gaps between a stream's chunks that ended while the long prompt was read. */
class Gaps {
  constructor() { this.from = Infinity; this.longest = 0; this.last = []; }
  take = ({ choices }) => {
    const now = performance.now();
    for (const { index } of choices) {
      if (now > this.from) this.longest = Math.max(this.longest, now - (this.last[index] ?? now));
      this.last[index] = now;
    }
  };
}

async function runLoad(signal) {
  const told = $("load-status"), name = String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const common = { model: modelName(), ignore_eos: true, prompt_cache_key: name };  // all to one engine
  const length = modelLength(), gaps = new Gaps();
  const room = Math.min(STREAM_TOKENS, Math.floor(length / 2)), kept = Math.min(PROMPT_TOKENS, length - 16);
  told.textContent = `${STREAMS} streams have begun.`;
  // One request: browsers open six connections to a host, and the live view needs one of them.
  const prompts = Array.from({ length: STREAMS }, (_, i) => `${i + 1}. A story:`);
  const four = { ...common, prompt: prompts, max_tokens: room };
  const streams = ask("v1/completions", four, { signal, take: gaps.take });
  streams.catch(() => {});  // it is awaited below; until then its failure is not unheard
  await new Promise((resolve) => setTimeout(resolve, HEAD_START_MS));
  signal.throwIfAborted();
  const began = gaps.from = performance.now();
  let first = null, read = kept;
  told.textContent = "A long prompt is being read beside them.";
  const take = (chunk) => {
    first ??= performance.now();
    read = chunk.usage?.prompt_tokens ?? read;
    gaps.from = Infinity;
  };
  const prompt = { ...common, prompt: longText(name), truncate_prompt_tokens: kept, max_tokens: 8 };
  await Promise.all([streams, ask("v1/completions", prompt, { signal, take })]);
  const beside = gaps.longest ? ` The longest gap of the streams beside it: ${Math.round(gaps.longest)} ms.` : "";
  told.textContent = `A prompt of ${read} tokens had its first token after ${Math.round(first - began)} ms.${beside}`;
}

async function toggleLoad() {
  if (loading) return loading.abort();
  if (!(await haveKey()) || loading) return;
  loading = new AbortController();
  $("load").textContent = "Stop the load";
  try {
    await runLoad(AbortSignal.any([loading.signal, AbortSignal.timeout(LONGEST_LOAD_MS)]));
  } catch (error) {
    const late = error.name === "TimeoutError" ? "Ended after a minute." : error.message;
    $("load-status").textContent = loading.signal.aborted ? "Stopped." : late;
    ifRefused(error);
  } finally {
    loading.abort();  // one that failed takes the others with it
    loading = null;
    $("load").textContent = "Load it";
  }
}
