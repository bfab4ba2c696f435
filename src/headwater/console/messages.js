// The messages of the log: a search in pages, one message with what became of it, and publishing, also of a copy.

import { Refusal } from "./connection.js";
import {
  $, ago, badge, bytes, complain, count, facts, fillTable, link, make, numberOf, pretty, readJson, setText, textOf,
  titled, unfolding, when, whole,
} from "./show.js";

const PAGE = 50; // messages of one page
const NAMED = ["type", "from", "to", "reply_to", "correlation_id", "content_type", "traceparent"]; // headers and fields
const NOT_COPIED = ["seq", "id", "size", "topic", "data", "unreadable", "published_at", "deliver_at", "expires_at"];
const STATES = {
  settled: ["settled", "good"], in_flight: ["in flight", "busy"], waiting: ["waiting", "warn"],
  undelivered: ["not yet delivered", ""], dead: ["dead letter", "bad"], not_matching: ["not matching", "off"],
  unknown: ["its filter is broken", "bad"],
};

/** A field with JSON; undefined if it is empty. */
export function readField(field) {
  if (!field.value.trim()) return undefined;
  try {
    return readJson(field.value);
  } catch (error) {
    throw new Refusal("This is not JSON, so it was not sent.", error.message);
  }
}

function markField({ target }) {
  try {
    readField(target);
    target.removeAttribute("aria-invalid");
  } catch {
    target.setAttribute("aria-invalid", "true");
  }
}

/** A field for JSON is checked while it is typed in, and sent with Ctrl-Enter. */
export function takesJson(field) {
  field.oninput = markField;
  field.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) field.form.requestSubmit();
  };
}

/** The condition for a header: as text, and as a number or a truth value if it reads like one. */
function headerCondition(name, value) {
  const path = NAMED.includes(name) || name === "version" ? name : `headers[${JSON.stringify(name)}]`;
  if (!value) return `${path} != null`;
  const isLiteral = /^(-?\d+(\.\d+)?|true|false)$/.test(value);
  return `${path} in [${JSON.stringify(value)}${isLiteral ? `, ${value}` : ""}]`;
}

export const addressOf = (seq) => `#messages/${textOf(seq)}`;

export class Messages {
  #query; // what the pages are of
  #pages = []; // for each page that was turned over, where it began
  #at; // where the page shown began: the bound of the search
  #shown = [];
  #next; // where the next page begins
  #asked = 0;
  #lastSeq = 0; // of the log
  #seenTo = 0; // the last seq of the log when the first page was looked for
  #seq; // of the message that is shown

  constructor(connection, onPublished) {
    this.connection = connection;
    $("find-form").onsubmit = (event) => {
      event.preventDefault();
      this.#begin();
    };
    $("find-next").onclick = () => this.#turn([...this.#pages, this.#at], this.#next);
    $("find-back").onclick = () =>
      this.#pages.length ? this.#turn(this.#pages.slice(0, -1), this.#pages.at(-1)) : this.#begin();
    $("find-on").onclick = () => this.#look(this.#next, this.#shown);
    $("message-close").onclick = () => (location.hash = "messages");
    $("message-copy").onclick = () => this.#copy();
    takesJson($("data"));
    takesJson($("options"));
    $("publish-form").onsubmit = (event) => {
      event.preventDefault();
      this.#publish(onPublished);
    };
  }

  /** Look for the first time, when the page is first seen, if the token may read. */
  lookIfShown() {
    if (this.#query || !$("find").checkVisibility()) return;
    if (!$("find-topic").value) $("find-topic").value = $("pattern").value;
    this.#begin();
  }

  /** How far the log goes. What came since the first page was looked for is a page further up. */
  note(lastSeq) {
    this.#lastSeq = lastSeq;
    this.#showBack();
  }

  #showBack() {
    const isNewer = this.#query?.order === "newest" && this.#lastSeq > this.#seenTo;
    $("find-back").disabled = !this.#pages.length && !isNewer;
  }

  /** What another token saw is not shown. */
  clear() {
    this.#query = undefined;
    this.#show([], undefined);
    this.#close();
  }

  browse(topic) {
    $("find-form").reset();
    $("find-topic").value = topic;
    this.#query = undefined;
  }

  /** Show the message that the address names, which a reload and the browser's Back keep; or none. */
  route() {
    const [page, seq] = location.hash.slice(1).split("/");
    if (page !== "messages" || (this.#message && this.#seq === seq)) return;
    if (!/^[1-9]\d*$/.test(seq)) this.#close();
    else this.#open(readJson(seq));
  }

  // --- searching ---

  #begin() {
    const conditions = [];
    const value = (id) => $(id).value.trim();
    if (value("find-header")) conditions.push(headerCondition(value("find-header"), value("find-value")));
    if (value("find-where")) conditions.push(conditions.length ? `(${value("find-where")})` : value("find-where"));
    const order = value("find-order"), time = (id) => (value(id) ? new Date(value(id)).toISOString() : undefined);
    this.#query = {
      topic: value("find-topic") || ">", order, where: conditions.join(" and ") || undefined,
      since: time("find-since"), until: time("find-until"),
    };
    if (value("find-after")) this.#query.after = Math.max(0, Number(value("find-after")) - 1);
    if (value("find-upto")) this.#query.upto = Number(value("find-upto"));
    this.#seenTo = this.#lastSeq;
    this.#turn([], undefined);
  }

  #turn(pages, at) {
    this.#pages = pages;
    this.#at = at;
    return this.#look(at, []);
  }

  /** Look from a position on; what was found before stays. */
  async #look(at, found) {
    const asked = (this.#asked += 1), isNewest = this.#query.order === "newest";
    const bound = at === undefined ? {} : { [isNewest ? "upto" : "after"]: at };
    complain("find-problem");
    $("find").setAttribute("aria-busy", "true");
    const began = performance.now();
    try {
      const limit = PAGE - found.length;
      const page = await this.connection.call("rpc.messages", { ...this.#query, ...bound, limit });
      if (asked === this.#asked) this.#show([...found, ...page.messages], page, performance.now() - began);
    } catch (error) {
      if (asked !== this.#asked) return;
      complain("find-problem", error);
      if (!found.length) this.#show([], undefined);
    } finally {
      if (asked === this.#asked) $("find").removeAttribute("aria-busy");
    }
  }

  #show(found, page, tookMs = 0) {
    this.#shown = found;
    this.#next = page?.looked_to;
    const isNewest = this.#query?.order !== "oldest", isCut = Boolean(page?.more) && found.length < PAGE;
    fillTable($("found-rows"), found, ({ seq }) => textOf(seq), [
      (cell, { seq }) => {
        const onclick = () => {
          if (location.hash === addressOf(seq)) this.#open(seq); // the address does not change
        };
        cell.firstChild ?? cell.append(link(`#${textOf(seq)}`, addressOf(seq), { className: "link", onclick }));
      },
      (cell, { published_at: at }) => setText(Object.assign(cell, { title: at }), when(at)),
      (cell, { topic }) => setText(Object.assign(cell, { title: topic }), topic),
      (cell, { preview, size }) => {
        const code = cell.firstChild ?? cell.appendChild(make("code"));
        setText(code, preview ?? `${bytes(size)} of data`);
      },
      (cell, { size }) => setText(cell, bytes(size)),
    ]);
    this.#mark();
    const looked = page && `${isNewest ? "down" : "up"} to seq ${whole(numberOf(page.looked_to) + (isNewest ? 1 : 0))}`;
    const some = found.length ? count(found.length, "message") : "No message matches";
    setText($("found-note"), !page ? "" : isCut
      ? `${some} so far: looked ${looked}, ${(tookMs / 1000).toFixed(1)} s.`
      : found.length ? `${some}, ${this.#range(found)}` : "");
    $("find-on").hidden = !isCut;
    setText($("find-next"), isNewest ? "Older" : "Newer");
    setText($("find-back"), isNewest ? "Newer" : "Older");
    $("find-next").disabled = !page?.more || isCut;
    if (isNewest && found.length) this.#seenTo = Math.max(this.#seenTo, numberOf(found[0].seq));
    this.#showBack();
  }

  #range(found) {
    const ends = [found[0], found.at(-1)].map(({ seq }) => whole(numberOf(seq)));
    return `seq ${[...new Set(ends)].join(" to ")}`;
  }

  /** Which row is the one shown beside. */
  #mark() {
    for (const row of $("found-rows").rows) {
      if (row.dataset.key === String(this.#seq)) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }

  // --- one message ---

  #message;

  async #open(seq) {
    this.#seq = textOf(seq);
    this.#message = undefined;
    $("message-copy").disabled = true;
    $("message").hidden = false;
    setText($("message-heading"), `Message #${textOf(seq)}`);
    complain("message-problem");
    this.#mark();
    try {
      const found = await this.connection.call("rpc.message", { sequence_id: seq });
      if (this.#seq !== textOf(seq)) return;
      this.#showMessage(found);
      $("message").scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (this.#seq !== textOf(seq)) return;
      $("message-body").replaceChildren();
      complain("message-problem", error);
    }
  }

  #close() {
    const row = $("found-rows").querySelector("[aria-current]"), isLeft = $("message").contains(document.activeElement);
    this.#seq = this.#message = undefined;
    $("message").hidden = true;
    $("message-body").replaceChildren();
    this.#mark();
    if (isLeft) row?.querySelector("a").focus(); // back to where it was opened
  }

  #showMessage({ message, pruned, deliveries, dead_letters: letters }) {
    this.#message = message;
    $("message-copy").disabled = !message;
    if (!message) {
      const why = pruned ? "Retention has deleted it." : "It was never published, or the token may not read its topic.";
      return $("message-body").replaceChildren(make("p", { className: "quiet", textContent: why }));
    }
    const { data, headers, seq, unreadable, size, published_at: at, topic, ...rest } = message;
    const others = Object.fromEntries(Object.entries(rest).filter(([name, value]) => name !== "priority" || value));
    $("message-body").replaceChildren(
      facts({ topic, published: `${at} (${ago(Date.parse(at))})`, size: `${bytes(size)} of data`, ...others }),
      ...titled(unreadable ? "Data, which is not JSON" : "Data", pretty(data)),
      ...(headers && Object.keys(headers).length ? titled("Headers", pretty(headers)) : []),
      ...(deliveries.length ? titled("Deliveries", this.#deliveries(deliveries, letters)) : []),
      ...(letters.length ? titled("Dead letters", make("ol", { className: "items" }, ...letters.map(letterItem))) : []),
    );
  }

  /** The subscriptions that match; the others unfold, there can be many of them. */
  #deliveries(deliveries, letters) {
    const isTo = ({ state }) => state !== "not_matching";
    const matching = deliveries.filter(isTo), others = deliveries.filter((each) => !isTo(each));
    const attemptsOf = (each) => each.attempts || letters.findLast((letter) => isOf(each, letter))?.attempts;
    const isOf = (each, { subscription }) => each.state === "dead" && subscription === each.subscription;
    const row = (each) => make("tr", {},
      make("td", {}, make("strong", { textContent: each.subscription }), make("code", { textContent: each.pattern })),
      make("td", {}, badge(...STATES[each.state]), make("span", { className: "sub", textContent: deliveryNote(each) })),
      make("td", { className: "number", textContent: attemptsOf(each) ? whole(attemptsOf(each)) : "" }));
    const table = (rows) => this.#deliveryTable(rows.map(row));
    const summary = make("summary", { textContent: `${count(others.length, "subscription")} not matching` });
    return make("div", {}, ...(matching.length ? [table(matching)] : []),
      ...(others.length ? [Object.assign(unfolding(summary, () => [table(others)]), { className: "more" })] : []));
  }

  #deliveryTable(rows) {
    const headings = ["Subscription", "State", "Attempts"].map((textContent, at) =>
      make("th", { textContent, className: at === 2 ? "number" : "" }));
    return make("div", { className: "scroll", tabIndex: 0 }, make("table", { className: "deliveries" },
      make("thead", {}, make("tr", {}, ...headings)), make("tbody", {}, ...rows)));
  }

  // --- publishing ---

  /** Fill the form with the message: nothing is sent until it is. Its id and times are those of another message. */
  #copy() {
    const { topic, data, unreadable } = this.#message;
    const kept = Object.entries(this.#message).filter(([name, value]) => !NOT_COPIED.includes(name) && value);
    $("topic").value = topic;
    $("data").value = unreadable ? JSON.stringify(data) : JSON.stringify(data, null, 2);
    $("options").value = kept.length ? JSON.stringify(Object.fromEntries(kept), null, 2) : "";
    $("more-options").open = Boolean(kept.length);
    setText($("published"), "");
    complain("publish-problem");
    setText($("publish-note"), `a copy of #${textOf(this.#message.seq)}; nothing is sent yet`);
    $("publish").scrollIntoView({ block: "nearest" });
    $("data").focus();
  }

  async #publish(onPublished) {
    complain("publish-problem");
    setText($("published"), "");
    try {
      const data = readField($("data")), options = readField($("options")) ?? {};
      if (data === undefined) throw new Refusal("There is no data.", "Any JSON will do, null too.");
      if (typeof options !== "object" || Array.isArray(options)) {
        throw new Refusal("The options are no JSON object.", 'Write them like {"headers": {"tenant": "acme"}}.');
      }
      const params = { ...options, topic: $("topic").value.trim(), data };
      const { sequence_id: seq } = await this.connection.call("rpc.publish", params);
      setText($("published"), `Stored as seq ${textOf(seq)}`);
      setText($("publish-note"), "");
      onPublished();
    } catch (error) {
      complain("publish-problem", error);
    }
  }
}

function deliveryNote({ state, holder, mode, due_ms: due, redriving, paused }) {
  const notes = [];
  if (redriving) notes.push("redriven");
  if (state === "in_flight") notes.push(holder ? `with ${holder}` : `with a consumer of this ${mode} subscription`);
  if (state === "in_flight" && due) notes.push(`until ${when(due)}`);
  if (["waiting", "undelivered"].includes(state)) {
    if (paused) notes.push("the subscription is paused");
    else if (due > Date.now()) notes.push(`due ${when(due)}`);
    else if (state === "waiting") notes.push("due now");
  }
  return notes.join(", ");
}

function letterItem({ id, subscription, reason, error, stack, handler, attempts, died_ms: at, redrives }) {
  const summary = make("summary", {},
    make("span", { className: "reason", textContent: reason.replaceAll("_", " ") }),
    make("strong", { textContent: subscription }),
    make("span", { className: "seq", textContent: when(at) }),
    make("code", { textContent: (error ?? "no error was given").split("\n", 1)[0] }));
  return make("li", {}, unfolding(summary, () => [
    facts({ "dead letter": id, attempts, handler, redrives }),
    ...(error ? titled("Error", make("pre", { textContent: error, tabIndex: 0 })) : []),
    ...(stack ? titled("Stack", make("pre", { textContent: stack, tabIndex: 0 })) : []),
  ]));
}
