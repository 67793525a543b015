// Owns the answer to why a request was slow: its wall time, a line for each cause.
// Never asks for a request that nobody has named.

const AGAIN_MS = 300;  // a stream's last byte comes a moment before the server has added up

async function timingOf(id) {
  const headers = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  const response = await fetch(at(`v1/requests/${encodeURIComponent(id)}/timing`), { headers });
  if (!response.ok) throw await failureOf(response);
  return response.json();
}

function timingLine(part, wall, kind) {
  const line = $("timing-part").content.firstElementChild.cloneNode(true);
  const put = (name, text) => { line.querySelector(`.${name}`).textContent = text; };
  line.classList.add(kind);
  line.dataset.cause = part.cause;
  put("ms", `${Math.round(part.ms)} ms`);
  put("about", part.about);
  line.querySelector("meter").value = part.ms / wall;
  return line;
}

function showTiming(timing) {
  const { wall_ms: wall, own, slowed_by: others, ahead } = timing;
  const told = [`${Math.round(wall)} ms`];
  if (timing.first_token_ms !== null) told.push(`first token after ${Math.round(timing.first_token_ms)} ms`);
  if (ahead?.requests) told.push(`${count(ahead.requests, "request", "requests")} ahead, ${ahead.prompt_tokens} tokens`);
  if (timing.migrations) told.push(count(timing.migrations, "migration", "migrations"));
  $("timing-told").textContent = told.join(" · ");
  const lines = [...others.map((part) => [part, "lost"]), ...own.map((part) => [part, "own"])];
  const shown = lines.filter(([part]) => part.ms >= 0.5);
  $("timing-parts").replaceChildren(...shown.map(([part, kind]) => timingLine(part, wall, kind)));
}

/** Show where the time of a request went. `again`: it has only just ended. */
async function explain(id, { again = false } = {}) {
  $("timing-id").value = id;
  try {
    showTiming(await timingOf(id));
  } catch (error) {
    if (again && error.status === 404) {
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      if ($("timing-id").value === id) await explain(id);
      return;
    }
    $("timing-parts").replaceChildren();
    $("timing-told").textContent = error instanceof Failure ? error.message : "The server cannot be reached.";
    askForKey(error);
  }
}
