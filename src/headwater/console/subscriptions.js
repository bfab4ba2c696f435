// The durable subscriptions: how far behind they are; and what to do with them, after asking.

import { $, ask, button, complain, count, fillTable, make, setText, span, tell, textOf, whole } from "./show.js";

const SUBSCRIPTIONS_MAX = 200; // shown at most
const STARTS = { first: "the first message", new: "only what comes from now on", seq: "a seq", time: "a time" };

const byName = (a, b) => (a.id < b.id ? -1 : 1);
const byLag = (a, b) => b.lag - a.lag;

export class Subscriptions {
  constructor(connection, onChange) {
    Object.assign(this, { connection, onChange });
  }

  show(all) {
    const shown = [...all].sort(byLag).slice(0, SUBSCRIPTIONS_MAX).sort(byName);
    fillTable($("subscription-rows"), shown, ({ id }) => id, [
      (cell, { id, pattern, gaps, problem }) => {
        if (!cell.firstChild) cell.append(make("strong"), make("code"), make("em"));
        setText(cell.children[0], id);
        setText(cell.children[1], pattern);
        setText(cell.children[2], problem ?? (gaps ? `${count(gaps, "message")} lost to retention` : ""));
      },
      (cell, { mode }) => setText(cell, mode),
      (cell, { lag, lag_is_least: isLeast }) => setText(cell, `${isLeast ? "≥ " : ""}${whole(lag)}`),
      (cell, { in_flight: inFlight }) => setText(cell, whole(inFlight)),
      (cell, { oldest_unacked_ms: ms }) => setText(cell, ms === null ? "–" : span(ms)),
      (cell, { holder, consumers = [] }) => {
        const names = holder ? [holder] : consumers;
        const text = names.length > 1 ? count(names.length, "consumer") : (names[0] ?? "–");
        setText(Object.assign(cell, { title: names.join("\n") }), text);
      },
      (cell, { dead }) => setText(cell, whole(dead)),
      (cell, { id }) => cell.firstChild ?? cell.append(make("span", { className: "actions" },
        button("Seek…", () => this.#seek(id)), button("Delete…", () => this.#delete(id), "small danger"))),
    ]);
  }

  async #seek(id) {
    const kind = make("select", { id: "seek-kind" },
      ...Object.entries(STARTS).map(([value, textContent]) => make("option", { value, textContent })));
    const at = make("input", { id: "seek-at", className: "mono", autocomplete: "off", hidden: true });
    const toLabel = make("label", { textContent: "Deliver from", htmlFor: "seek-kind" });
    const atLabel = make("label", { className: "hidden-label", textContent: "Seq or time", htmlFor: "seek-at" });
    kind.onchange = () => {
      at.hidden = !["seq", "time"].includes(kind.value);
      Object.assign(at, { type: kind.value === "time" ? "datetime-local" : "number", min: "1", required: !at.hidden });
    };
    const textContent = "Messages from there on are delivered, again if need be; those before it are skipped.";
    const what = make("p", { textContent });
    const agreed = await ask({
      title: `Move ${id}?`, body: [make("p", { className: "line" }, toLabel, kind, atLabel, at), what], verb: "Seek",
    });
    if (!agreed) return;
    const start = { seq: () => Number(at.value), time: () => new Date(at.value).toISOString() }[kind.value];
    await this.#do("rpc.seek", { subscription_id: id, start: start ? start() : kind.value },
      ({ sequence_id: seq }) => `${id} goes on after seq ${textOf(seq)}`);
  }

  async #delete(id) {
    const body = ["Its position, its deliveries and its retries are deleted. The messages stay. It cannot be undone."];
    const agreed = await ask({ title: `Delete ${id}?`, body, verb: "Delete", className: "danger" });
    if (agreed) await this.#do("rpc.subscription.remove", { subscription_id: id }, () => `${id} is deleted`);
  }

  async #do(method, params, done) {
    complain("subscriptions-problem");
    tell("subscriptions-done", "");
    try {
      tell("subscriptions-done", done(await this.connection.call(method, params)));
    } catch (error) {
      complain("subscriptions-problem", error);
    }
    this.onChange();
  }
}
