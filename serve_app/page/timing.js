// Owns the answer to why a request was slow: its wall time as a bar of causes, and the same in words.
// Never asks for a request that nobody has named.

const AGAIN_MS = 300;  // a stream's last byte comes a moment before the server has added up
const KINDS = {  // of causes, by the colour that they share
  prefill: ["prefill", "kv_load"],
  decode: ["decode"],
  wait: ["queue", "gate", "memory", "preemption", "adapter", "grammar", "inputs"],
  beside: ["prefill_beside_prompts", "prefill_beside_answers", "decode_beside_prompts", "decode_beside_answers"],
};  // and "other": the way to the server and back, and what is not known
const kindOf = (cause) => Object.keys(KINDS).find((kind) => KINDS[kind].includes(cause)) ?? "other";

async function timingOf(id) {
  const response = await fetch(at(`v1/requests/${encodeURIComponent(id)}/timing`), { headers: authorized() })
    .catch(() => { throw new Failure(GONE); });
  if (!response.ok) throw await failureOf(response);
  return response.json();
}

const percent = (share) => (share >= 0.005 ? `${Math.round(share * 100)} %` : "< 1 %");

function timingLine(part) {
  const line = $("timing-part").content.firstElementChild.cloneNode(true);
  const put = (name, text) => { line.querySelector(`.${name}`).textContent = text; };
  line.dataset.cause = part.cause;
  line.querySelector(".swatch").classList.add(kindOf(part.cause));
  put("ms", `${Math.round(part.ms)} ms`);
  put("share", percent(part.share));
  put("about", part.about);
  return line;
}

function segment(part) {
  const element = make("span", [], kindOf(part.cause));
  element.style.flexGrow = part.share;
  return element;
}

/** `place` has the elements of the template "timing-shown". */
function showTiming(place, timing) {
  const { wall_ms: wall, own, slowed_by: others, ahead } = timing;
  const told = [`${Math.round(wall)} ms`];
  if (timing.first_token_ms !== null) told.push(`first token after ${Math.round(timing.first_token_ms)} ms`);
  if (ahead?.requests) told.push(`${count(ahead.requests, "request", "requests")} ahead, ${ahead.prompt_tokens} tokens`);
  if (timing.migrations) told.push(count(timing.migrations, "migration", "migrations"));
  place.querySelector(".told").textContent = told.join(" · ");
  const shown = [...own, ...others].filter((part) => part.ms >= 0.5);
  const stack = place.querySelector(".stack");
  const words = shown.map((part) => `${part.cause.replaceAll("_", " ")} ${percent(part.share)}`);
  stack.replaceChildren(...shown.map(segment));
  stack.setAttribute("aria-label", `Shares of the time: ${words.join(", ")}`);
  stack.hidden = !shown.length;
  place.querySelector(".parts").replaceChildren(...shown.map(timingLine));
}

function showNoTiming(place, told) {
  place.querySelector(".told").textContent = told;
  place.querySelector(".stack").hidden = true;
  place.querySelector(".parts").replaceChildren();
}

/** Show where the time of a request went, or in a line why that is not to be had. */
async function explain(id, place, { again = true } = {}) {
  place.dataset.id = id;
  try {
    const timing = await timingOf(id);
    if (place.dataset.id === id) showTiming(place, timing);  // and nobody has asked for another meanwhile
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (place.dataset.id !== id) return;
    if (again && error.status === 404) {
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      if (place.dataset.id === id) await explain(id, place, { again: false });
      return;
    }
    showNoTiming(place, error.message);
    ifRefused(error);
  }
}
