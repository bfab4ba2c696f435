// Charts over time as SVG: lines or filled areas with axes, the values under the pointer, and zoom by choosing a span.
// A value that is null was not recorded: the line has a gap there.

import { make, setText } from "./show.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const HEIGHT = 168, LEFT = 52, RIGHT = 8, TOP = 10, BOTTOM = 22; // in pixels, which the drawing's units are
const TICKS_Y = 3, TICK_PX = 92;
const SERIES_MAX = 6, COLOURS = 8; // that a reader can tell apart
const DAY_S = 86_400, DAY_MS = 1000 * DAY_S;
const STEPS_S = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  ...[1, 2, 3, 4, 7, 14, 21, 28, 42, 56, 84, 112, 168, 224, 336, 448, 672, 896, 1344].map((days) => days * DAY_S)];
const ROUND_MS = [ // from a second to a day
  ...[1, 2, 5, 10, 20, 30].map((s) => 1e3 * s), ...[1, 2, 5, 10, 20, 30].map((min) => 6e4 * min),
  ...[1, 2, 4, 8, 12, 24].map((h) => 36e5 * h),
];

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A round number not below `value`: 1, 2 or 5 times a power of the base; or a round time, if `value` is of ms. */
export function roundUp(value, base = 10) {
  if (value <= 0) return 1;
  if (base === "ms" && value > DAY_MS) return DAY_MS * roundUp(value / DAY_MS);
  if (base === "ms") return value > 1000 ? ROUND_MS.find((round) => round >= value) : roundUp(value);
  const power = base ** Math.floor(Math.log(value) / Math.log(base));
  const factors = base === 10 ? [1, 2, 3, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  return factors.map((factor) => factor * power).find((round) => round >= value * 0.9999) ?? power * base;
}

const two = (number) => String(number).padStart(2, "0");
const dayOf = (date) => date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
export const minuteOf = (ms) => `${two(new Date(ms).getHours())}:${two(new Date(ms).getMinutes())}`;
export const momentOf = (ms) => `${dayOf(new Date(ms))}, ${minuteOf(ms)}`;

/** Where the ticks of the time axis lie: on round local times, as far apart as their labels need. */
export function timeTicks(fromMs, untilMs, widthPx) {
  const most = Math.max(2, Math.floor(widthPx / TICK_PX));
  const stepMs = 1000 * (STEPS_S.find((step) => (untilMs - fromMs) / (step * 1000) <= most) ?? STEPS_S.at(-1));
  const offsetMs = new Date(fromMs).getTimezoneOffset() * 60_000;
  const ticks = [];
  const first = Math.ceil((fromMs - offsetMs) / stepMs) * stepMs + offsetMs;
  const moved = (at) => at + new Date(at).getTimezoneOffset() * 60_000 - offsetMs; // when the clocks have changed
  for (let at = first; moved(at) <= untilMs; at += stepMs) ticks.push(moved(at));
  const isDay = (at) => stepMs >= DAY_MS || minuteOf(at) === "00:00";
  return ticks.map((at) => ({ at, text: isDay(at) ? dayOf(new Date(at)) : minuteOf(at) }));
}

/** Parts of a line between gaps; a value alone is drawn as a dot. */
function parts(values) {
  const found = [];
  values.forEach((value, at) => {
    if (!isKnown(value)) return;
    if (at > 0 && found.length && found.at(-1).at(-1)[0] === at - 1) found.at(-1).push([at, value]);
    else found.push([[at, value]]);
  });
  return found;
}

const isKnown = (value) => value !== null && value !== undefined;

/** Gives each name a colour, which it keeps: in every chart that shares these, and while others come and go. */
export class Colours {
  #of = new Map();

  /** The numbers of the colours of these names, which are shown together. */
  of(names) {
    const taken = new Set(names.map((name) => this.#of.get(name)));
    for (const name of names.filter((each) => !this.#of.has(each))) {
      let number = 1;
      while (taken.has(number) && number < COLOURS) number += 1;
      taken.add(number);
      this.#of.set(name, number);
    }
    return names.map((name) => this.#of.get(name));
  }
}

export class Chart {
  #data = null;
  #at = null; // which value the pointer or the arrow keys are at
  #width = 0;

  /** `format` spells a value; `base` is 2 for bytes and "ms" for times; `isWhole`: there are no fractions; `isFilled`
   * draws an area below a single line. Charts of one `group` show the same moment together. */
  constructor(title, {
    format, base = 10, isWhole = false, isFilled = false, group = new Set(), colours = new Colours(),
  }) {
    Object.assign(this, { title, format, base, isWhole, isFilled, group, colours });
    group.add(this);
    this.svg = draw("svg", { class: "chart", role: "img", tabindex: 0, height: HEIGHT, hidden: "" });
    this.legend = make("ul", { className: "legend" });
    this.now = make("p", { className: "now", role: "status" });
    this.empty = make("p", { className: "no-data", textContent: "Loading…" });
    const head = make("header", {}, make("h2", { textContent: title }), this.now);
    this.element = make("figure", { className: "panel figure" }, head, this.svg, this.empty, this.legend);
    this.svg.addEventListener("pointermove", ({ offsetX }) => this.#pointAll(this.#stepAt(offsetX)));
    this.svg.addEventListener("pointerleave", () => this.#pointAll(null));
    this.svg.addEventListener("blur", () => this.#pointAll(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(([{ contentRect }]) => {
      if (Math.round(contentRect.width) === this.#width) return;
      this.#width = Math.round(contentRect.width);
      this.#draw();
    }).observe(this.element);
  }

  /** `data`: `fromMs`, `stepMs`, `series`, each with `name` and `values`, and what to say if they are `empty`. */
  show(data) {
    const peak = ({ values }) => Math.max(0, ...values.filter(isKnown));
    const greatest = new Set([...data.series].sort((a, b) => peak(b) - peak(a)).slice(0, SERIES_MAX));
    const series = data.series.filter((each) => greatest.has(each));
    const colours = this.colours.of(series.map(({ name }) => name));
    series.forEach((each, at) => (each.colour = `s${colours[at]}`));
    this.#data = { ...data, series, more: data.series.length - series.length };
    this.#draw();
  }

  clear(empty) {
    this.show({ fromMs: 0, stepMs: 0, series: [], empty });
  }

  #pointAll(at) {
    for (const chart of this.group) chart.#point(at);
  }

  get #steps() {
    return Math.max(0, ...this.#data.series.map(({ values }) => values.length));
  }

  #x(at) {
    const width = this.#width - LEFT - RIGHT;
    return this.#steps > 1 ? LEFT + (width * at) / (this.#steps - 1) : LEFT + width / 2;
  }

  #stepAt(x) {
    const share = (x - LEFT) / Math.max(1, this.#width - LEFT - RIGHT);
    return Math.min(Math.max(Math.round(share * (this.#steps - 1)), 0), this.#steps - 1);
  }

  #draw() {
    if (!this.#data || !this.#width) return;
    const { fromMs, stepMs, series } = this.#data;
    const known = series.flatMap(({ values }) => values).filter(isKnown);
    this.svg.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.svg.toggleAttribute("hidden", !known.length);
    this.empty.hidden = known.length > 0;
    setText(this.empty, this.#data.empty ?? "No figures yet: the server records them every minute.");
    const tick = roundUp(Math.max(0, ...known) / TICKS_Y, this.base);
    const top = (this.isWhole ? Math.max(1, tick) : tick) * TICKS_Y;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const untilMs = fromMs + stepMs * (this.#steps - 1);
    const axes = draw("g", { class: "axes" });
    for (let line = 0; line <= TICKS_Y; line += 1) {
      const value = (top * line) / TICKS_Y, at = Math.round(y(value)) + 0.5;
      axes.append(draw("line", { x1: LEFT, x2: this.#width - RIGHT, y1: at, y2: at, class: line ? "" : "ground" }));
      axes.append(draw("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, this.format(value)));
    }
    for (const { at, text } of timeTicks(fromMs, untilMs, this.#width - LEFT - RIGHT)) {
      const x = this.#x((at - fromMs) / stepMs);
      const anchor = x > this.#width - 30 ? "end" : x < LEFT + 18 ? "start" : "middle";
      axes.append(draw("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, text));
    }
    const lines = series.map(({ values, colour }) => {
      const group = draw("g", { class: `series ${colour}` });
      for (const part of parts(values)) {
        const points = part.map(([at, value]) => `${this.#x(at).toFixed(1)},${y(value).toFixed(1)}`);
        if (part.length === 1) {
          group.append(draw("circle", { cx: this.#x(part[0][0]), cy: y(part[0][1]), r: 2.5 }));
          continue;
        }
        const ends = [part.at(-1)[0], part[0][0]].map((at) => `${this.#x(at).toFixed(1)},${y(0)}`);
        if (this.isFilled) group.append(draw("polygon", { points: [...points, ...ends].join(" ") }));
        group.append(draw("polyline", { points: points.join(" ") }));
      }
      return group;
    });
    this.cursor = draw("g", { class: "cursor" });
    this.svg.replaceChildren(axes, ...lines, this.cursor);
    this.yOf = y;
    this.#point(this.#at);
  }

  /** Show the values at a step, or the last ones. */
  #point(at) {
    if (!this.#data) return;
    this.#at = at !== null && at < this.#steps ? at : null;
    const { fromMs, stepMs, series, more } = this.#data;
    const spelled = (value) => (isKnown(value) ? this.format(value) : "–");
    const valueOf = ({ values }) => (this.#at === null ? values.findLast(isKnown) : values[this.#at]);
    const when = this.#at === null ? "" : momentOf(fromMs + stepMs * this.#at);
    setText(this.now, series.length === 1 ? [when, spelled(valueOf(series[0]))].filter(Boolean).join("  ") : when);
    this.legend.hidden = series.length < 2;
    const items = series.map((each) => [each.colour, each.name, spelled(valueOf(each))]);
    if (more > 0) items.push(["", `and ${more} more`, ""]);
    while (this.legend.children.length > items.length) this.legend.lastChild.remove();
    items.forEach(([key, name, value], number) => {
      const item = this.legend.children[number] ?? this.legend.appendChild(make("li", {}, make("span"), make("b")));
      Object.assign(item, { className: key, title: name });
      setText(item.children[0], name);
      setText(item.children[1], value);
    });
    const said = items.map(([, name, value]) => `${name} ${value}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}${when ? ` at ${when}` : ""}: ${said || "no values"}`);
    this.cursor?.replaceChildren();
    if (this.#at === null || !this.cursor) return;
    const x = this.#x(this.#at);
    this.cursor.append(draw("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    for (const { values, colour } of series.filter(({ values }) => isKnown(values[this.#at]))) {
      this.cursor.append(draw("circle", { cx: x, cy: this.yOf(values[this.#at]), r: 3.5, class: colour }));
    }
  }

  #key(event) {
    if (!this.#data) return;
    const last = this.#steps - 1, at = this.#at ?? last;
    const wanted = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.#pointAll(null);
    if (wanted === undefined) return;
    event.preventDefault();
    this.#pointAll(Math.min(Math.max(this.#at === null ? at : wanted, 0), last));
  }
}
