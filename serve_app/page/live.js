// Owns the live view: a card for each engine, asked for once a second while somebody can see it.
// Never asks again for steps that it has.

const POLL_MS = 1000, LONGEST_MS = 10000, KEPT = 512;
const TIERS = { host: "KV in host memory", disk: "KV on disk" };
const cards = new Map();  // engine -> its card
let timer = 0, wait = POLL_MS, polling = new AbortController();

function bytes(number) {
  const power = number >= 2 ** 30 ? 3 : 2, unit = { 2: "MiB", 3: "GiB" }[power];
  return `${(number / 1024 ** power).toLocaleString("en", { maximumFractionDigits: 1 })} ${unit}`;
}

class Card {
  constructor(name, model) {
    this.element = $("engine").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = model ? `engine ${name} of ${model}` : `engine ${name}`;
    $("engines").append(this.element);
    this.chart = new Chart(this.element.querySelector("canvas"), this.element.querySelector(".reading"));
    this.steps = [];
  }

  get newest() { return this.steps.at(-1)?.id; }

  show(told) {
    const arrived = performance.now();
    const later = told.steps.filter((step) => !(step.id <= this.newest));
    this.steps.push(...later.map((step) => ({ ...step, ended: arrived - step.age_ms })));
    this.steps.splice(0, this.steps.length - KEPT);
    const whole = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });
    const gap = (ms) => (ms === null ? "–" : whole(ms));
    const share = Math.round((100 * told.num_held_blocks) / told.num_blocks);
    this.put("running", told.num_running, `of ${told.max_num_seqs}`);
    this.put("waiting", told.num_waiting, told.num_loading ? `${whole(told.num_loading)} loading` : "");
    this.put("blocks", `${share} %`, `${told.num_held_blocks} of ${told.num_blocks}`);
    this.put("prompt", whole(told.prompt_tokens_per_s));
    this.put("generated", whole(told.generated_tokens_per_s));
    for (const tier of told.tiers ?? []) {
      const used = tier.capacity_bytes ? Math.round((100 * tier.used_bytes) / tier.capacity_bytes) : 0;
      this.place(tier.tier, TIERS[tier.tier] ?? tier.tier);
      this.put(tier.tier, `${used} %`, `of ${bytes(tier.capacity_bytes)}, ${whole(tier.hit_tokens)} tokens loaded`);
    }
    this.put("gaps", `${gap(told.gap_p50_ms)} / ${gap(told.gap_p99_ms)}`, "ms");
    this.chart.draw(this.steps, told.tpot_ms);
  }

  /** A place for a number that only some engines have, behind those that are there. */
  place(name, title) {
    if (this.element.querySelector(`[data-is=${name}]`)) return;
    const number = make("dd", []);
    number.dataset.is = name;
    this.element.querySelector(".numbers").append(make("div", [make("dt", [title]), number], "tier"));
  }

  put(name, value, unit = "") {
    const small = document.createElement("small");
    small.textContent = unit;
    this.element.querySelector(`[data-is=${name}]`).replaceChildren(`${value} `, small);
  }
}

function showFleet(text, bad = false) {
  if ($("fleet").textContent === text) return;
  $("fleet").textContent = text;
  $("fleet").classList.toggle("bad", bad);
}

function show(told) {
  suggestModel(told.model);
  const owners = new Map((told.models ?? []).flatMap(({ model, engines }) => engines.map((name) => [name, model])));
  const there = new Set(told.engines.map((one) => one.engine));
  for (const [name, card] of cards) if (!there.has(name)) { card.element.remove(); cards.delete(name); }
  for (const engine of told.engines) {
    if (!cards.has(engine.engine)) cards.set(engine.engine, new Card(engine.engine, owners.get(engine.engine)));
    cards.get(engine.engine).show(engine);
  }
  const waiting = sum(told.ingresses.map((one) => one.num_waiting));
  const who = waiting ? count(waiting, "request waits", "requests wait") : "nothing waits";
  const parts = [count(told.engines.length, "engine", "engines")];
  parts.push(count(told.ingresses.length, "ingress replica", "ingress replicas"), `${who} at the ingress`);
  if (told.num_missing) parts.push(`${count(told.num_missing, "replica does", "replicas do")} not answer`);
  if (!told.engines.length) parts.push("an engine starts with the next request");
  showFleet(parts.join(" · "), told.num_missing > 0);
}

async function poll({ signal }) {
  const after = new URLSearchParams([...cards].filter(([, card]) => card.newest !== undefined)
    .map(([name, card]) => ["after", `${name}:${card.newest}`]));
  try {
    const patience = AbortSignal.any([signal, AbortSignal.timeout(LONGEST_MS)]);
    const response = await fetch(at(`activity?${after}`), { signal: patience });
    if (!response.ok) throw await failureOf(response);
    show(await response.json());
    if (wait > POLL_MS) lookUpModels();  // it is back, and may be another
    wait = POLL_MS;
  } catch (error) {
    if (signal.aborted) return;
    wait = Math.min(2 * wait, LONGEST_MS);  // a server that has trouble is not asked more often
    showFleet(error instanceof Failure ? error.message : GONE, true);
  }
  timer = setTimeout(poll, wait, polling);
}

/** One loop at most: it stops when the page is hidden, and goes on when it is seen again. */
function follow() {
  clearTimeout(timer);
  polling.abort();
  polling = new AbortController();
  if (!document.hidden) poll(polling);
}

/** After a change of colours. */
function redraw() {
  for (const card of cards.values()) card.chart.draw(card.steps);
}
