// The dead letters: how many, which, why; and what to do with them, after asking.

import { Refusal } from "./connection.js";
import {
  $, ask, complain, count, facts, make, pretty, preview, setText, tell, textOf, titled, unfolding, whole,
} from "./show.js";

const LOOK_MS = 10_000; // between two looks, unless something says that they have changed
const PAGE = 50, LETTERS_MAX = 1_000; // the server gives no more at once
const EVERY = "All subscriptions";

export class DeadLetters {
  #counts = { total: 0, redriving: 0, by_subscription: {} };
  #wanted = PAGE;
  #lookedAt = -LOOK_MS;
  #dead = 0;

  constructor(connection) {
    this.connection = connection;
    $("letter-filter").onchange = () => this.#lookNow();
    $("more-letters").onclick = () => {
      this.#wanted = Math.min(this.#wanted + PAGE, LETTERS_MAX);
      this.#lookNow();
    };
    $("redrive-all").onclick = () => this.#settleAll("redrive");
    $("purge-all").onclick = () => this.#settleAll("purge");
  }

  async lookIfDue({ subscriptions }) {
    const dead = subscriptions.reduce((sum, each) => sum + each.dead, 0);
    const isDue = performance.now() - this.#lookedAt >= LOOK_MS;
    if (isDue || dead !== this.#dead || this.#counts.redriving) await this.#look();
    this.#dead = dead;
  }

  #lookNow() {
    return this.#look().catch((error) => complain("letters-problem", error));
  }

  async #look() {
    this.#lookedAt = performance.now();
    const [counts, letters] = await Promise.all([
      this.connection.call("rpc.dead_letters.stats"),
      this.connection.call("rpc.dead_letters", { limit: this.#wanted, ...this.#filter }),
    ]);
    this.#counts = counts;
    setText($("letter-count"), whole(counts.total));
    setText($("redriving"), counts.redriving ? `${whole(counts.redriving)} on the way again` : "");
    tell("letter-badge", counts.total ? whole(counts.total) : "");
    $("letter-tile").classList.toggle("alarm", counts.total > 0);
    $("redrive-all").disabled = $("purge-all").disabled = !letters.length;
    $("more-letters").hidden = letters.length < this.#wanted || this.#wanted >= LETTERS_MAX;
    this.#showChoice(Object.keys(counts.by_subscription).sort());
    this.#showLetters(letters);
  }

  get #filter() {
    const subscription = $("letter-filter").value;
    return subscription ? { subscription } : {};
  }

  #showChoice(names) {
    const chosen = $("letter-filter").value;
    const values = [...new Set(["", ...names, chosen])];
    if (values.join("\n") === [...$("letter-filter").options].map(({ value }) => value).join("\n")) return;
    const option = (value) => make("option", { value, textContent: value || EVERY });
    $("letter-filter").replaceChildren(...values.map(option));
    $("letter-filter").value = chosen;
  }

  /** What has not changed stays the element it is, open or not. */
  #showLetters(letters) {
    const states = letters.map(({ id, redrives, redriving }) => [id, redrives, redriving].join());
    const old = new Map([...$("letter-list").children].map((item) => [item.dataset.state, item]));
    if (states.join("\n") === [...old.keys()].join("\n")) return;
    const items = letters.map((letter, at) => old.get(states[at]) ?? this.#item(letter, states[at]));
    $("letter-list").replaceChildren(...items);
  }

  #item(letter, state) {
    const { message, redriving, reason } = letter;
    const summary = make("summary", {},
      make("span", { className: "reason", textContent: redriving ? "redriving" : reason.replaceAll("_", " ") }),
      make("strong", { textContent: letter.subscription }),
      make("span", { className: "seq", textContent: `${message.topic} #${textOf(message.seq)}` }),
      make("code", { textContent: preview(letter.error ?? "no error was given") }));
    const item = make("li", {}, unfolding(summary, () => this.#body(letter)));
    item.dataset.state = state;
    return item;
  }

  #body({ id, message, stack, error, subscription, ...letter }) {
    const { data, headers, seq, topic, ...rest } = message;
    const what = `letter ${id}, ${topic} #${textOf(seq)} of ${subscription}`;
    const button = (textContent, className, verb) => {
      const onclick = () => this.#settle(verb, what, { ids: [id] });
      return make("button", { type: "button", className, textContent, onclick });
    };
    const buttons = [button("Redrive…", "small", "redrive"), button("Purge…", "small danger", "purge")];
    return [
      make("p", { className: "foot" }, ...buttons),
      facts({
        died: new Date(letter.died_ms).toISOString(), attempts: letter.attempts, handler: letter.handler,
        redrives: letter.redrives, "last redrive": letter.redrive_error, ...rest,
      }),
      ...(error ? titled("Error", make("pre", { textContent: error, tabIndex: 0 })) : []),
      ...(stack ? titled("Stack", make("pre", { textContent: stack, tabIndex: 0 })) : []),
      ...(headers ? titled("Headers", pretty(headers)) : []),
      ...titled("Data", pretty(data)),
    ];
  }

  #settleAll(verb) {
    const { subscription } = this.#filter;
    const { total, by_subscription: by } = this.#counts;
    const number = subscription === undefined ? total : (by[subscription] ?? 0);
    this.#settle(verb, `${count(number, "dead letter")} of ${subscription ?? "all subscriptions"}`, this.#filter);
  }

  async #settle(verb, what, filter) {
    const isPurge = verb === "purge";
    const agreed = isPurge
      ? await ask({ title: `Purge ${what}?`, body: ["It cannot be undone."], verb: "Purge", className: "danger" })
      : await ask({
        title: `Redrive ${what}?`, body: ["What is delivered again stays here until it is acked."], verb: "Redrive",
      });
    if (!agreed) return;
    complain("letters-problem");
    tell("letters-done", "");
    try {
      const done = await this.connection.call(`rpc.dead_letters.${verb}`, filter);
      tell("letters-done", isPurge ? `${count(done, "letter")} purged` : `${count(done.redriven, "letter")} redriven`);
      const whys = Object.values(done.failed ?? {});
      if (whys.length) throw new Refusal(`${count(whys.length, "letter")} could not be redriven: ${whys[0]}`);
    } catch (error) {
      complain("letters-problem", error);
    }
    await this.#lookNow();
  }
}
