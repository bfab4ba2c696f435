// Values as text and elements. The content of a log is untrusted text: it enters the page through textContent and
// text nodes, never as markup.

const POINTS_MAX = 30; // of a small curve; the drawing in index.html is as wide
const PREVIEW_CHARS = 160, JSON_CHARS_MAX = 100_000; // shown in a line, and unfolded
const PAINTED_CHARS_MAX = 20_000;
const COPIED_MS = 1_500;

export const $ = (id) => document.getElementById(id);

export function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // or a selection would be lost at every look
}

// --- JSON ------------------------------------------------------------------------------------------------------------

// A number that JavaScript cannot hold keeps its digits, in browsers that tell how it was written.
const exactly = (_, value, context) =>
  typeof value === "number" && context?.source && JSON.rawJSON && context.source !== String(value)
    ? JSON.rawJSON(context.source)
    : value;

export const readJson = (text) => JSON.parse(text, exactly);
export const numberOf = (value) => (JSON.isRawJSON?.(value) ? Number(value.rawJSON) : value);
export const textOf = (value) => (JSON.isRawJSON?.(value) ? value.rawJSON : String(value));

export const preview = (text) => text.slice(0, PREVIEW_CHARS);

const TOKENS = /("(?:\\.|[^"\\])*")(\s*:)?|\b(?:true|false|null)\b|-?\d[\d.eE+-]*/g;

export function pretty(value) {
  const text = JSON.stringify(value, null, 2);
  const shown = text.slice(0, JSON_CHARS_MAX);
  const pre = make("pre", { tabIndex: 0 });
  let at = 0;
  for (const found of shown.length > PAINTED_CHARS_MAX ? [] : shown.matchAll(TOKENS)) {
    const textContent = found[1] ?? found[0];
    const className = found[2] ? "key" : found[1] ? "string" : "literal";
    pre.append(shown.slice(at, found.index), make("span", { className, textContent }));
    at = found.index + textContent.length;
  }
  pre.append(shown.slice(at));
  if (shown.length < text.length) pre.append(`\n… and ${count(text.length - shown.length, "character")} more`);
  return pre;
}

// --- numbers and times -----------------------------------------------------------------------------------------------

const wholeFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const shortFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const whole = (number) => wholeFormat.format(number);
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
export const perSecond = (rate) => `${rate < 100 ? shortFormat.format(rate) : whole(rate)}/s`;

// As headwater/message/units.py spells them.
function inUnits(amount, units) {
  const [size, name] = units.findLast(([size]) => amount >= size * 0.9995) ?? units[0];
  const scaled = amount / size;
  return `${scaled < 99.95 ? shortFormat.format(Math.round(scaled * 1000) / 1000) : whole(scaled)} ${name}`;
}

const BYTES = [[1, "B"], [2 ** 10, "KiB"], [2 ** 20, "MiB"], [2 ** 30, "GiB"], [2 ** 40, "TiB"], [2 ** 50, "PiB"]];
const SPANS = [[1e3, "s"], [6e4, "min"], [36e5, "h"], [864e5, "d"]];
export const bytes = (amount) => inUnits(amount, BYTES);
export const span = (ms) => inUnits(ms, SPANS);
export const clock = (moment) => new Date(moment).toLocaleTimeString("en-GB");

/** A moment as short as it can be told: without the day if it is today. */
export function when(moment) {
  const at = new Date(moment), time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

/** To the second, minute, hour or day: more changes while one reads it. */
export function ago(ms) {
  const passedMs = Date.now() - ms;
  const [size, name] = SPANS.findLast(([size]) => passedMs >= size) ?? SPANS[0];
  return passedMs < 1_000 ? "just now" : `${whole(Math.floor(passedMs / size))} ${name} ago`;
}

// --- elements --------------------------------------------------------------------------------------------------------

/** Say what went wrong, why, and what to do next, in the place where it happened; without an error, be silent. */
export function complain(id, error) {
  $(id).hidden = !error;
  $(id).replaceChildren();
  if (!error) return;
  const why = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  const textContent = error.where ? `${why} (${error.where})` : why;
  const [next, ...drawn] = (error.next ?? "").split("\n"); // a mark below the place in what was written
  $(id).append(make("strong", { textContent }), next);
  if (drawn.length) $(id).append(make("pre", { textContent: drawn.join("\n") }));
}

/** Ask before something is done. `body` are elements or texts; a `form` in it is checked before a yes. The promise is
 * true after a yes, and false after Cancel or Escape. `isOver`: there is nothing to say yes to. */
export function ask({ title, body = [], verb, className = "primary", no = "Cancel", isOver = false }) {
  const dialog = $("ask");
  setText($("ask-title"), title);
  $("ask-text").replaceChildren(...body);
  complain("ask-problem");
  Object.assign($("ask-yes"), { textContent: verb, className, disabled: isOver });
  setText($("ask-no"), no);
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    const answering = (agreed) => () => {
      const fields = agreed ? [...dialog.querySelectorAll("input, textarea, select")] : [];
      const wrong = fields.find((field) => !field.checkValidity());
      if (wrong) return wrong.reportValidity();
      resolve(agreed);
      dialog.close();
    };
    $("ask-yes").onclick = answering(true);
    $("ask-no").onclick = answering(false);
    dialog.onclose = () => dialog.open || resolve(false); // by Escape; or late, when it is open for another question
  });
}

export function tell(id, text) {
  $(id).hidden = !text;
  setText($(id), text);
}

export function facts(values) {
  const known = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  const pair = ([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: textOf(value) })];
  return make("dl", { className: "facts" }, ...known.flatMap(pair));
}

export const button = (textContent, onclick, className = "small") =>
  make("button", { type: "button", className, textContent, onclick });

export const link = (textContent, href, properties = {}) => make("a", { textContent, href, ...properties });

/** A short word about a state, with its colour. */
export const badge = (textContent, kind = "") => make("span", { className: `badge ${kind}`, textContent });

/** A command to type elsewhere, and a button that copies it. */
export function command(text) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      setText(copy, "Copied");
    } catch {
      getSelection().selectAllChildren(code); // without the right to the clipboard, a selection to copy by hand
    }
    setTimeout(() => setText(copy, "Copy"), COPIED_MS);
  });
  const code = make("code", { textContent: text, tabIndex: 0 });
  return make("p", { className: "command" }, code, copy);
}

export const titled = (title, element) => [make("h3", { textContent: title }), element];

/** What unfolds is made when it is first looked at. */
export function unfolding(summary, body) {
  const details = make("details", {}, summary);
  details.ontoggle = () => {
    if (details.open && details.children.length === 1) details.append(make("div", {}, ...body()));
  };
  return details;
}

/** Those items with a text that contains what is typed into the filter of this name; if none has, that is said. */
export function containing(name, items, textsOf, none) {
  const wanted = $(`${name}-filter`).value.trim();
  setText($(`no-${name}s`), items.length ? `No ${name} contains ${wanted}` : none);
  return items.filter((item) => textsOf(item).some((text) => text.includes(wanted)));
}

/** Rows stay the elements they are, so that focus and selection survive a look. */
export function fillTable(body, items, keyOf, columns) {
  const headings = [...body.parentElement.tHead.rows[0].cells];
  const newRow = () => make("tr", {}, ...headings.map(({ className }) => make("td", { className })));
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, at) => {
    const key = keyOf(item);
    const row = old.get(key) ?? newRow();
    old.delete(key);
    row.dataset.key = key;
    headings.forEach(({ textContent }, n) => {
      row.cells[n].dataset.label = textContent; // small screens show it beside the value
      columns[n](row.cells[n], item);
    });
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  old.forEach((row) => row.remove());
}

// --- how fast something grows ----------------------------------------------------------------------------------------

export class Growth {
  points = [];
  rate = 0;
  #total;
  #at;

  note(total) {
    const now = performance.now();
    if (this.#at !== undefined) {
      const grown = total - this.#total;
      if (grown >= 0) this.rate = (grown * 1000) / (now - this.#at); // when retention took some, the last rate stands
      this.points = [...this.points, this.rate].slice(-POINTS_MAX);
    }
    [this.#total, this.#at] = [total, now];
  }

  /** A rate is known after two looks. */
  get rateText() {
    return this.points.length ? perSecond(this.rate) : "–";
  }

  draw(place) {
    const svg = place.querySelector("svg") ?? place.appendChild($("curve").content.firstElementChild.cloneNode(true));
    const first = POINTS_MAX - this.points.length + 1;
    const top = Math.max(1, ...this.points);
    const line = this.points.map((point, at) => `${first + at},${(19 - (17 * point) / top).toFixed(1)}`).join(" ");
    svg.querySelector("polyline").setAttribute("points", line);
    svg.querySelector("polygon").setAttribute("points", line && `${first},20 ${line} ${POINTS_MAX},20`);
  }
}
