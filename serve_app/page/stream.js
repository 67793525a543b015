// Owns requests to the API: a stream's events as they come, and failures as one kind of error.
// Never touches the document.

const base = new URL(location.pathname.endsWith("/") ? "." : `${location.pathname}/`, location.href);
const at = (path) => new URL(path, base);

const GONE = "The server cannot be reached.";

class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The data of each server-sent event; comments, which keep a silent stream open, are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // nobody reads on: the server is to learn it
  }
}

async function failureOf(response) {
  const told = await response.json().catch(() => null);  // a proxy in front may answer in HTML
  const message = told?.error?.message ?? `The server answered with ${response.status} ${response.statusText}`.trim();
  return new Failure(message, response.status);
}

/** Ask, and give each chunk of the answer to `take` as it comes. Rejects with a Failure, or as `signal` does. */
async function ask(path, body, { signal, take }) {
  const headers = { "Content-Type": "application/json", ...authorized() };
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const request = { method: "POST", headers, signal, body: JSON.stringify({ ...body, ...options }) };
  const lost = (why) => (error) => { throw signal.aborted ? error : new Failure(why); };
  const response = await fetch(at(path), request).catch(lost(GONE));
  if (!response.ok) throw await failureOf(response);
  const all = events(response.body), cut = "The connection ended before the answer did.";
  for (;;) {
    const { value: data, done } = await all.next().catch(lost(cut));
    if (done) throw new Failure(cut);
    const chunk = data === "[DONE]" ? null : JSON.parse(data);
    if (chunk && !chunk.error) {
      take(chunk);
      continue;
    }
    await all.return();
    if (chunk) throw new Failure(chunk.error.message);
    return;
  }
}
