// Owns the strip chart: one column a step, prefill tokens above the line, decode rows below it, time at the foot.
// Never asks for data, and is not the only way to read it: each chart comes with a sentence.

const COLUMN = 4, PAUSE = 9, LEFT = 46, PAUSE_MS = 1000;
const LANES = { prefill: [12, 96], decode: [97, 145], time: [164, 200] };  // top and bottom, in CSS pixels

/** A round number that is not below `value`: `least`, or one of 10, 15, 20, 30, ... */
function roundUp(value, least) {
  if (value <= least) return least;
  for (let power = 1; ; power *= 10)
    for (const step of [10, 15, 20, 30, 40, 50, 60, 80]) if (step * power >= value) return step * power;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const most = (numbers, least) => roundUp(Math.max(0, ...numbers), least);

/** The newest steps that fit, oldest first, each with the x of its column. */
function layOut(steps, width) {
  const placed = [];
  let x = width - COLUMN;
  for (let i = steps.length - 1; i >= 0 && x >= LEFT; i--) {
    const pause = i > 0 && steps[i].ended - steps[i].ms - steps[i - 1].ended >= PAUSE_MS;
    placed.unshift({ step: steps[i], x, pause: pause && x - PAUSE >= LEFT });
    x -= COLUMN + (pause ? PAUSE : 0);
  }
  return placed;
}

class Chart {
  constructor(canvas, reading) {
    this.canvas = canvas;
    this.reading = reading;
    this.placed = [];
    this.pointer = null;
    canvas.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.read(); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; this.read(); });
    new ResizeObserver(() => this.draw(this.steps ?? [])).observe(canvas);
  }

  /** `target`: the longest time between two tokens that the engine aims at, in milliseconds; null if it has none. */
  draw(steps, target = this.target ?? null) {
    this.steps = steps;
    this.target = target;
    const { canvas } = this, width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    this.pen = canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    this.colour = (name) => style.getPropertyValue(`--${name}`);
    this.placed = layOut(steps, width);
    const shown = this.placed.map((one) => one.step);
    this.tops = {
      prefill: most(shown.map((step) => sum(step.chunks)), 50),
      decode: most(shown.map((step) => step.decodes), 8),
      time: most([target ?? 0, ...shown.flatMap((step) => [step.ms, step.predicted_ms ?? 0])], 10),
    };
    this.frame(width);
    for (const one of this.placed) this.column(one);
    this.read();
  }

  frame(width) {
    const { pen } = this, baseline = LANES.decode[0] - 1;
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const label = (text, y) => { pen.fillStyle = this.colour("soft"); pen.fillText(text, LEFT - 7, y); };
    const rule = (y) => { pen.fillStyle = this.colour("line"); pen.fillRect(LEFT, y, width - LEFT, 1); };
    [LANES.prefill[0] - 1, LANES.decode[1], LANES.time[1]].forEach(rule);
    pen.fillStyle = this.colour("time");
    pen.fillRect(LEFT, baseline, width - LEFT, 1);
    if (this.target !== null) this.mark(this.target, LEFT, width - LEFT);
    const short = (number) => (number < 1000 ? number : `${number / 1000}k`);
    label(`${short(this.tops.prefill)} tok`, LANES.prefill[0]);
    label(`${this.tops.decode} rows`, LANES.decode[1]);
    label(this.tops.time < 1000 ? `${this.tops.time} ms` : `${this.tops.time / 1000} s`, LANES.time[0]);
  }

  /** A line at a time, in milliseconds. */
  mark(ms, x, width) {
    const [top, bottom] = LANES.time;
    this.pen.fillStyle = this.colour("soft");
    this.pen.fillRect(x, bottom - (ms * (bottom - top)) / this.tops.time, width, 1);
  }

  /** A bar of at least a pixel and a half: what happened is to be seen. */
  bar(lane, x, from, to, down) {
    const [top, bottom] = LANES[lane], scale = (bottom - top) / this.tops[lane];
    const size = Math.max(1.5, (to - from) * scale);
    this.pen.fillStyle = this.colour(lane);
    this.pen.fillRect(x, down ? top + from * scale : bottom - from * scale - size, COLUMN - 1, size);
  }

  column({ step, x, pause }) {
    const [top, bottom] = LANES.prefill, scale = (bottom - top) / this.tops.prefill;
    let done = 0;
    for (const chunk of step.chunks) {
      this.bar("prefill", x, done, done + chunk, false);
      if (done && chunk * scale > 3) {  // a seam between the chunks of two prompts, where there is room for it
        this.pen.fillStyle = this.colour("panel");
        this.pen.fillRect(x, bottom - done * scale, COLUMN - 1, 1);
      }
      done += chunk;
    }
    if (step.decodes) this.bar("decode", x, 0, step.decodes, true);
    this.bar("time", x, 0, step.ms, false);
    if (step.predicted_ms != null) this.mark(step.predicted_ms, x, COLUMN - 1);
    if (pause) this.idle(x - PAUSE / 2 - 0.5);
  }

  idle(x) {
    const { pen } = this;
    pen.strokeStyle = this.colour("soft");
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(x, LANES.prefill[0]);
    pen.lineTo(x, LANES.time[1]);
    pen.stroke();
  }

  /** In words: the step under the pointer, or all of them. */
  read() {
    const at = this.pointer ?? -1, under = this.placed.find(({ x }) => at >= x && at < x + COLUMN);
    const told = summary(this.placed.map((one) => one.step));
    this.canvas.setAttribute("aria-label", `Strip chart of the engine's steps. ${told}`);
    this.reading.textContent = under ? inWords(under.step) : told;
  }
}

const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;

function inWords(step) {
  const parts = [];
  if (step.decodes) parts.push(count(step.decodes, "decode row", "decode rows"));
  const chunks = count(step.chunks.length, "chunk", "chunks");
  if (step.chunks.length) parts.push(`${chunks} of ${step.chunks.join(" + ")} tokens`);
  const predicted = step.predicted_ms == null ? "" : ` of predicted ${step.predicted_ms.toFixed(1)}`;
  return `Step ${step.id}: ${parts.join(", ")}; ${step.ms.toFixed(1)}${predicted} ms, ${step.waiting} waiting`;
}

function summary(steps) {
  if (!steps.length) return "No steps yet.";
  const prefill = steps.filter((step) => step.chunks.length), shared = prefill.filter((step) => step.decodes);
  const told = `${count(steps.length, "step", "steps")}: ${prefill.length} with prefill`;
  return `${told}, of which ${shared.length} moved streams on as well.`;
}
