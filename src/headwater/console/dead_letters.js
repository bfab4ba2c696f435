// The dead letters, grouped by what failed alike; and what to do with them, after a dry run says what that would be.

import { addressOf } from "./messages.js";
import {
  $, ask, badge, button, complain, count, facts, make, pretty, preview, setText, tell, textOf, titled, unfolding, when,
  whole,
} from "./show.js";

const LOOK_MS = 10_000; // between two looks, unless something says that they have changed
const PAGE = 50; // letters of a group that are loaded at a time
const GROUPS_MAX = 200; // shown
const WHYS_MAX = 5, NAMED_MAX = 10; // reasons and subscriptions listed in a dialog
const EVERY = "All subscriptions";

const keyOf = ({ subscription, reason, handler, error }) => JSON.stringify([subscription, reason, handler, error]);

export class DeadLetters {
  #counts = { total: 0, redriving: 0, by_subscription: {} };
  #lookedAt = -LOOK_MS;
  #isBlind = false; // the last look failed
  #dead = 0;
  #chosen = new Map(); // the ids of the letters that are ticked, with their boxes

  constructor(connection) {
    this.connection = connection;
    $("letter-filter").onchange = () => this.#lookNow();
    $("letter-topics").onchange = () => {
      $("letter-list").replaceChildren(); // a group of the same name has other letters there
      this.#lookNow();
    };
    $("redrive-all").onclick = () => this.#settle("redrive", "all", this.#filter);
    $("purge-all").onclick = () => this.#settle("purge", "all", this.#filter);
    $("redrive-chosen").onclick = () => this.#settle("redrive", "the selected", this.#withIds(this.#chosen.keys()));
    $("purge-chosen").onclick = () => this.#settle("purge", "the selected", this.#withIds(this.#chosen.keys()));
    $("choose-none").onclick = () => this.#chooseNone();
  }

  /** The token may be another. One that may not manage every topic sees one of its patterns at a time. */
  begin() {
    const patterns = this.connection.may("manage-all") ? [] : (this.connection.rights.manage ?? []);
    const chosen = $("letter-topics").value;
    $("letter-topics").replaceChildren(...patterns.map((value) => make("option", { value, textContent: value })));
    if (patterns.includes(chosen)) $("letter-topics").value = chosen;
    $("letter-topics").hidden = !patterns.length;
    this.#lookedAt = -LOOK_MS;
  }

  async lookIfDue({ subscriptions }) {
    const dead = subscriptions.reduce((sum, each) => sum + each.dead, 0);
    const isDue = performance.now() - this.#lookedAt >= LOOK_MS;
    if (isDue || dead !== this.#dead || this.#counts.redriving) await this.#lookNow();
    this.#dead = dead;
  }

  async #lookNow() {
    try {
      await this.#look();
      if (this.#isBlind) complain("letters-problem");
      this.#isBlind = false;
    } catch (error) {
      if (!this.connection.isReady) return;
      this.#isBlind = true;
      complain("letters-problem", error);
    }
  }

  async #look() {
    this.#lookedAt = performance.now();
    const [counts, groups] = await Promise.all([
      this.connection.call("rpc.dead_letters.stats", this.#topics),
      this.connection.call("rpc.dead_letters.groups", this.#filter),
    ]);
    this.#counts = counts;
    setText($("letter-count"), whole(counts.total));
    const again = counts.redriving ? `${whole(counts.redriving)} being redriven` : "";
    setText($("redriving"), [this.#topics.topic && `of ${this.#topics.topic}`, again].filter(Boolean).join(", "));
    tell("letter-badge", counts.total ? whole(counts.total) : "");
    $("letter-tile").classList.toggle("alarm", counts.total > 0);
    $("redrive-all").disabled = $("purge-all").disabled = !groups.length;
    this.#showChoice(Object.keys(counts.by_subscription).sort());
    this.#showGroups(groups);
  }

  get #topics() {
    const topic = $("letter-topics").value;
    return topic ? { topic } : {};
  }

  get #filter() {
    const subscription = $("letter-filter").value;
    return subscription ? { ...this.#topics, subscription } : this.#topics;
  }

  #withIds(ids) {
    return { ...this.#topics, ids: [...ids] };
  }

  #ofGroup({ subscription, reason, handler, error }) {
    return { ...this.#topics, subscription, reason, handler, error_kind: error };
  }

  #showChoice(names) {
    const chosen = $("letter-filter").value;
    const values = [...new Set(["", ...names, chosen])];
    if (values.join("\n") === [...$("letter-filter").options].map(({ value }) => value).join("\n")) return;
    const option = (value) => make("option", { value, textContent: value || EVERY });
    $("letter-filter").replaceChildren(...values.map(option));
    $("letter-filter").value = chosen;
  }

  // --- groups ---

  /** What has not changed stays the element it is, open or not. */
  #showGroups(groups) {
    const total = groups.reduce((sum, each) => sum + each.count, 0);
    setText($("letters-note"), groups.length ? `${count(total, "letter")} in ${count(groups.length, "group")}` : "");
    const old = new Map([...$("letter-list").children].map((item) => [item.dataset.key, item]));
    const items = groups.slice(0, GROUPS_MAX).map((group) => old.get(keyOf(group)) ?? this.#item(group));
    items.forEach((item, at) => this.#update(item, groups[at]));
    const isSame = items.length === old.size && items.every((item, at) => $("letter-list").children[at] === item);
    if (!isSame) $("letter-list").replaceChildren(...items);
    for (const [id, box] of this.#chosen) if (!box.isConnected) this.#chosen.delete(id);
    this.#showChosen();
  }

  #item(group) {
    const summary = make("summary", { className: "group" },
      make("b", { className: "number" }),
      make("span", { className: "reason", textContent: group.reason.replaceAll("_", " ") }),
      make("code", { className: "error", textContent: group.error || "no error was given" }),
      make("span", { className: "whose" },
        make("strong", { textContent: group.subscription }), group.handler ? ` · ${group.handler}` : ""),
      make("span", { className: "quiet" }), make("span"));
    const list = make("ol", { className: "items letters" });
    const item = make("li", {}, unfolding(summary, () => this.#groupBody(item, list)));
    item.dataset.key = keyOf(group);
    item.letters = list;
    return item;
  }

  #update(item, group) {
    const { count: number, redriving, first_ms: first, last_ms: last } = group;
    const [total, , , , times, again] = item.querySelector("summary").children;
    const isChanged = item.group && ["count", "redriving", "last_id"].some((name) => item.group[name] !== group[name]);
    item.group = group;
    setText(total, whole(number));
    setText(times, [...new Set([when(first), when(last)])].join(" to "));
    again.replaceChildren(...(redriving ? [badge(`${whole(redriving)} redriving`, "busy")] : []));
    if (isChanged && item.letters.isConnected) this.#load(item);
  }

  #groupBody(item, list) {
    const stack = make("div"), more = button("Show more", () => this.#load(item, true));
    const act = (verb, className) => button(`${verb} group…`, () =>
      this.#settle(verb.toLowerCase(), "the group", this.#ofGroup(item.group)), className);
    item.more = more;
    this.#load(item);
    this.#showStack(item, stack);
    const actions = make("p", { className: "foot" }, act("Redrive", "small"), act("Purge", "small danger"));
    actions.dataset.right = "manage";
    return [actions, stack, ...titled("Letters, oldest first", list), more];
  }

  async #showStack({ group: { last_id: id } }, place) {
    try {
      const { error, stack } = await this.connection.call("rpc.dead_letters.get", { id });
      const whole = stack ?? error;
      if (!whole) return;
      place.replaceChildren(...titled(`${stack ? "Stack" : "Error"} of the newest`,
        make("pre", { textContent: whole, tabIndex: 0, className: "stack" })));
    } catch {
      // It is gone meanwhile: the next look takes the group off, or shows another newest.
    }
  }

  /** Load the letters of a group that are shown, or a page more of them. */
  async #load(item, isMore = false) {
    const known = [...item.letters.children];
    const limit = PAGE * Math.max(1, Math.ceil(known.length / PAGE));
    const page = isMore ? { after: Number(known.at(-1).dataset.id), limit: PAGE } : { limit };
    try {
      const letters = await this.#letters(item.group, page);
      const old = new Map(known.map((each) => [each.dataset.state, each]));
      const items = letters.map((letter) => old.get(stateOf(letter)) ?? this.#letter(letter));
      if (isMore) item.letters.append(...items);
      else item.letters.replaceChildren(...items);
      item.more.hidden = item.letters.children.length >= item.group.count || !letters.length;
    } catch (error) {
      complain("letters-problem", error);
    }
  }

  /** An answer may have fewer letters than were asked for, because the server looks through those of other errors too:
   * only an empty one is the end. */
  async #letters(group, { after = 0, limit }) {
    const found = [];
    while (found.length < Math.min(limit, group.count)) {
      const params = { ...this.#ofGroup(group), after, limit };
      const letters = await this.connection.call("rpc.dead_letters", params);
      if (!letters.length) break;
      found.push(...letters);
      after = letters.at(-1).id;
    }
    return found.slice(0, limit);
  }

  // --- letters ---

  #letter(letter) {
    const { id, message, redriving, died_ms: at, attempts } = letter;
    const what = `${message.topic} #${textOf(message.seq)}`;
    const box = make("input", { type: "checkbox", ariaLabel: `Select letter ${id}, ${what}` });
    box.onchange = () => {
      if (box.checked) this.#chosen.set(id, box);
      else this.#chosen.delete(id);
      this.#showChosen();
    };
    const summary = make("summary", {},
      make("time", { textContent: when(at), title: new Date(at).toISOString() }),
      make("strong", { textContent: message.topic }),
      ...(redriving ? [badge("redriving", "busy")] : []),
      make("span", { className: "seq", textContent: `${count(attempts, "attempt")} · #${textOf(message.seq)}` }),
      make("code", { textContent: preview(JSON.stringify(message.data)) }));
    const item = make("li", { className: "letter" }, box, unfolding(summary, () => this.#body(letter)));
    Object.assign(item.dataset, { state: stateOf(letter), id });
    return item;
  }

  #body({ id, message, stack, error, subscription, ...letter }) {
    const { data, headers, seq, topic, unreadable, ...rest } = message;
    const what = `letter ${id}, ${topic} #${textOf(seq)} of ${subscription}`;
    const act = (verb, className) => button(`${verb}…`, () =>
      this.#settle(verb.toLowerCase(), what, this.#withIds([id])), className);
    const toMessage = button("Show message", () => (location.hash = addressOf(seq)));
    toMessage.dataset.right = "read";
    return [
      make("p", { className: "foot" }, act("Redrive", "small"), act("Purge", "small danger"), toMessage),
      facts({
        letter: id, died: new Date(letter.died_ms).toISOString(), attempts: letter.attempts, handler: letter.handler,
        redrives: letter.redrives, "last redrive": letter.redrive_error, ...rest,
      }),
      ...(error ? titled("Error", make("pre", { textContent: error, tabIndex: 0 })) : []),
      ...(stack ? titled("Stack", make("pre", { textContent: stack, tabIndex: 0 })) : []),
      ...(headers ? titled("Headers", pretty(headers)) : []),
      ...titled("Data", pretty(data)),
    ];
  }

  #chooseNone() {
    this.#chosen.forEach((box) => (box.checked = false));
    this.#chosen.clear();
    this.#showChosen();
  }

  #showChosen() {
    $("chosen").hidden = !this.#chosen.size;
    setText($("chosen-note"), `${count(this.#chosen.size, "letter")} selected`);
  }

  // --- settling ---

  /** What would be done is asked for first, and shown; then the same is done. */
  async #settle(verb, what, filter) {
    const isPurge = verb === "purge", method = `rpc.dead_letters.${verb}`;
    complain("letters-problem");
    tell("letters-done", "");
    try {
      const [would, { by_subscription: by }] = await Promise.all([
        this.connection.call(method, { ...filter, dry_run: true }),
        this.connection.call("rpc.dead_letters.stats", filter),
      ]);
      const agreed = await (isPurge ? askPurge(what, would, by) : askRedrive(what, would, by));
      if (!agreed) return;
      const done = await this.connection.call(method, filter);
      tell("letters-done", isPurge ? `${count(done, "letter")} purged` : redriveOutcome(done));
      this.#chooseNone();
    } catch (error) {
      complain("letters-problem", error);
    }
    await this.#lookNow();
  }
}

function askPurge(what, number, bySubscription) {
  const textContent = `${count(number, "dead letter")} would be deleted. It cannot be undone.`;
  const body = [make("p", { textContent }), ofWhich(bySubscription)];
  return ask({ title: `Purge ${what}?`, body, verb: `Purge ${whole(number)}`, className: "danger" });
}

function askRedrive(what, { redriven, failed }, bySubscription) {
  const textContent = `${count(redriven, "dead letter")} would be delivered again. Each stays here until it is acked.`;
  const body = [make("p", { textContent }), ofWhich(bySubscription)], whys = new Map();
  Object.values(failed).forEach((why) => whys.set(why, (whys.get(why) ?? 0) + 1));
  for (const [why, number] of [...whys].slice(0, WHYS_MAX)) {
    body.push(make("p", { className: "stays", textContent: `${count(number, "letter")} would stay: ${why}` }));
  }
  const title = `Redrive ${what}?`;
  if (redriven) return ask({ title, body, verb: `Redrive ${whole(redriven)}` });
  return ask({ title, body, verb: "Nothing to redrive", isOver: true, no: "Close" });
}

/** The letters chosen, by subscription. */
function ofWhich(bySubscription) {
  const named = Object.entries(bySubscription).slice(0, NAMED_MAX);
  const rest = Object.keys(bySubscription).length - named.length;
  return facts({ ...Object.fromEntries(named.map(([name, number]) => [name, whole(number)])),
    ...(rest ? { "…": `${count(rest, "more subscription")}` } : {}) });
}

const stateOf = ({ id, redrives, redriving }) => [id, redrives, redriving].join();

function redriveOutcome({ redriven, failed }) {
  const stay = Object.keys(failed).length;
  return `${count(redriven, "letter")} redriven${stay ? `, ${count(stay, "letter")} stayed` : ""}`;
}
