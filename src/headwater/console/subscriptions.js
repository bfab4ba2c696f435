// The durable subscriptions: how far behind they are; and what to do with them, after a preview or a question.

import {
  $, ask, badge, button, complain, containing, count, fillTable, make, setText, span, tell, textOf, when, whole,
} from "./show.js";

const SUBSCRIPTIONS_MAX = 200; // shown at most
const PREVIEW_MS = 250; // typed nothing for so long: ask what the seek would do
const STARTS = { first: "the first message", new: "only what comes from now on", seq: "a seq", time: "a time" };

const byName = (a, b) => (a.id < b.id ? -1 : 1);
const byLag = (a, b) => b.lag - a.lag;

export class Subscriptions {
  #all = [];

  constructor(connection, onChange) {
    Object.assign(this, { connection, onChange });
    $("subscription-filter").oninput = () => this.show(this.#all);
  }

  show(all) {
    this.#all = all;
    const none = "There are no durable subscriptions yet.";
    const found = containing("subscription", all, ({ id, pattern }) => [id, pattern], none);
    const shown = found.sort(byLag).slice(0, SUBSCRIPTIONS_MAX).sort(byName);
    const note = `the ${SUBSCRIPTIONS_MAX} with the greatest lag of ${whole(found.length)}`;
    setText($("subscriptions-note"), shown.length < found.length ? note : "");
    fillTable($("subscription-rows"), shown, ({ id }) => id, [
      (cell, { id, pattern, gaps, problem, paused_ms: paused }) => {
        if (!cell.firstChild) cell.append(make("strong"), make("code"), make("em"), make("span"));
        setText(cell.children[0], id);
        setText(cell.children[1], pattern);
        setText(cell.children[2], problem ?? (gaps ? `${count(gaps, "message")} lost to retention` : ""));
        const text = paused ? `paused since ${when(paused)}` : "";
        const [, , , note] = cell.children;
        if (note.textContent !== text) note.replaceChildren(...(text ? [badge(text, "warn")] : []));
      },
      (cell, { mode }) => setText(cell, mode),
      (cell, { lag, lag_is_least: isLeast }) => setText(cell, `${isLeast ? "≥ " : ""}${whole(lag)}`),
      (cell, { in_flight: inFlight, waiting }) => {
        const title = waiting ? `${whole(waiting)} more wait for their next attempt` : "";
        setText(Object.assign(cell, { title }), whole(inFlight));
      },
      (cell, { oldest_unacked_ms: ms }) => setText(cell, ms === null ? "–" : span(ms)),
      (cell, each) => showHolders(cell, each),
      (cell, { dead }) => setText(cell, whole(dead)),
      (cell, { id, paused_ms: paused }) => {
        if (!cell.firstChild) cell.append(this.#actions(id));
        const [pause, resume] = cell.firstChild.children;
        pause.hidden = Boolean(paused);
        resume.hidden = !paused;
      },
    ]);
  }

  #actions(id) {
    const actions = make("span", { className: "actions" },
      button("Pause", () => this.#do("rpc.subscription.pause", { subscription_id: id }, () => `${id} is paused`)),
      button("Resume", () => this.#do("rpc.subscription.resume", { subscription_id: id }, () => `${id} goes on`)),
      button("Seek…", () => this.#seek(id)), button("Delete…", () => this.#delete(id), "small danger"));
    actions.dataset.right = "consume manage";
    return actions;
  }

  async #seek(id) {
    const kind = make("select", { id: "seek-kind" },
      ...Object.entries(STARTS).map(([value, textContent]) => make("option", { value, textContent })));
    const at = make("input", { id: "seek-at", className: "mono", autocomplete: "off", hidden: true });
    const toLabel = make("label", { textContent: "Deliver from", htmlFor: "seek-kind" });
    const atLabel = make("label", { className: "hidden-label", textContent: "Seq or time", htmlFor: "seek-at" });
    const would = make("div", { id: "seek-would", className: "would", ariaLive: "polite" });
    const start = () => ({ seq: () => Number(at.value), time: () => new Date(at.value).toISOString() })[kind.value]?.()
      ?? kind.value;
    let timer = 0, asked = 0;
    const look = async () => {
      const number = (asked += 1);
      complain("ask-problem");
      would.replaceChildren();
      $("ask-yes").disabled = false; // an empty field says itself what is missing
      if (!at.checkValidity()) return;
      try {
        const params = { subscription_id: id, start: start(), dry_run: true };
        const found = await this.connection.call("rpc.seek", params);
        if (number === asked) would.replaceChildren(...seekWould(found));
      } catch (error) {
        if (number !== asked) return;
        complain("ask-problem", error);
        $("ask-yes").disabled = true;
      }
    };
    kind.onchange = () => {
      at.hidden = !["seq", "time"].includes(kind.value);
      Object.assign(at, { type: kind.value === "time" ? "datetime-local" : "number", min: "1", required: !at.hidden });
      look();
    };
    at.oninput = () => {
      clearTimeout(timer);
      timer = setTimeout(look, PREVIEW_MS);
    };
    const answer = ask({
      title: `Move ${id}?`, body: [make("p", { className: "line" }, toLabel, kind, atLabel, at), would], verb: "Seek",
    });
    look();
    const agreed = await answer;
    clearTimeout(timer);
    asked += 1; // what is still on its way is for no dialog
    if (!agreed) return;
    await this.#do("rpc.seek", { subscription_id: id, start: start() },
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

/** The holder of an exclusive subscription, or the consumers of a shared one, which unfold. */
function showHolders(cell, { holder, consumers = [] }) {
  const names = holder ? [holder] : consumers, text = names.join("\n");
  if (cell.dataset.names === text) return;
  cell.dataset.names = text;
  if (names.length < 2) return cell.replaceChildren(make("span", { textContent: names[0] ?? "–", title: text }));
  const isOpen = cell.querySelector("details")?.open ?? false;
  const list = make("ul", {}, ...names.map((textContent) => make("li", { textContent })));
  const summary = make("summary", { textContent: count(names.length, "consumer") });
  cell.replaceChildren(make("details", { className: "consumers", open: isOpen }, summary, list));
}

function seekWould({ sequence_id: seq, again, again_is_least: isAgainLeast, skipped, skipped_is_least: isSkippedLeast,
  next, first_skipped: firstSkipped }) {
  const line = (number, isLeast, text) => make("p", { className: number ? "" : "quiet" },
    make("b", { textContent: `${isLeast ? "≥ " : ""}${whole(number)}` }), ` ${text}`);
  const list = (title, briefs) => (briefs.length ? [make("h3", { textContent: title }),
    make("ol", { className: "briefs" }, ...briefs.map(brief))] : []);
  return [
    make("p", { className: "quiet", textContent: `It would go on after seq ${textOf(seq)}.` }),
    line(again, isAgainLeast, "settled before, delivered again"),
    line(skipped, isSkippedLeast, "not settled yet, never delivered"),
    ...list("Next to be delivered", next),
    ...list("First to be skipped", firstSkipped),
  ];
}

function brief({ seq, topic, published_at: at, preview }) {
  return make("li", {}, make("span", { className: "seq", textContent: `#${textOf(seq)}` }),
    make("span", { className: "quiet", textContent: when(at) }), make("strong", { textContent: topic }),
    make("code", { textContent: preview ?? "" }));
}
