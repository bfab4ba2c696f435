// Figures over time: the server keeps them in the log, so that they survive a restart of either side.

import { Chart, Colours } from "./chart.js";
import { $, bytes, complain, count, numberOf, perSecond, setText, whole } from "./show.js";

const LOOK_MS = 20_000; // the server takes a sample twice a minute

export class OverTime {
  hasSubscriptions; // unknown until the statistics are here
  #span = "hour";
  #shown; // the span that the charts show
  #lookedAt = -LOOK_MS;
  #charts;

  constructor(connection) {
    this.connection = connection;
    const group = new Set(), colours = new Colours();
    this.#charts = {
      published: new Chart("Published per second", { format: perSecond, isFilled: true, group }),
      acked: new Chart("Acked per second", { format: perSecond, group, colours }),
      lag: new Chart("Lag", { format: whole, isWhole: true, group, colours }),
      dead: new Chart("Dead letters", { format: whole, isWhole: true, isFilled: true, group }),
      file: new Chart("Size of the log", { format: bytes, base: 2, isWhole: true, isFilled: true, group }),
      journal: new Chart("Write-ahead log", { format: bytes, base: 2, isWhole: true, isFilled: true, group }),
    };
    $("charts").append(...Object.values(this.#charts).map(({ element }) => element));
    for (const button of $("zoom").children) button.onclick = () => this.#zoom(button.dataset.span);
  }

  /** The server, its log or the token may be another. */
  begin() {
    this.#lookedAt = -LOOK_MS;
  }

  async lookIfDue() {
    if (performance.now() - this.#lookedAt < LOOK_MS || !$("over-time").checkVisibility()) return;
    this.#lookedAt = performance.now();
    const span = this.#span;
    try {
      const found = await this.connection.call("rpc.stats.history", { span });
      if (span !== this.#span) return;
      complain("over-time-problem");
      this.#show(found);
      this.#shown = span;
      if (!found.file_bytes.some(Boolean)) this.begin(); // the server has just started: its first sample comes soon
    } catch (error) {
      if (span !== this.#span || !this.connection.isReady) return;
      complain("over-time-problem", error);
      if (this.#shown === span) return; // old figures are better than none, those of another time are not
      for (const chart of Object.values(this.#charts)) chart.clear("No figures could be read.");
    }
  }

  #zoom(span) {
    this.#span = span;
    for (const each of $("zoom").children) each.ariaPressed = String(each.dataset.span === span);
    this.begin();
    this.lookIfDue();
  }

  #show({ from_ms: fromMs, step_ms: stepMs, subscriptions, subscriptions_left_out: leftOut, ...figures }) {
    const each = Object.entries(subscriptions);
    const shown = count(each.length, "subscription"), more = whole(leftOut);
    setText($("over-time-note"), leftOut ? `the ${shown} with the greatest lag; ${more} more are not shown` : "");
    const show = (chart, series, empty) => this.#charts[chart].show({
      fromMs, stepMs, empty, series: series.map(({ name, values }) => ({ name, values: values.map(numberOf) })),
    });
    const none = this.hasSubscriptions === false ? "There are no durable subscriptions yet." : undefined;
    show("published", [{ name: "published", values: figures.published }]);
    show("acked", each.map(([name, { acked }]) => ({ name, values: acked })), none);
    show("lag", each.map(([name, { lag }]) => ({ name, values: lag })), none);
    show("dead", [{ name: "dead letters", values: figures.dead_letters }]);
    show("file", [{ name: "log", values: figures.file_bytes }]);
    show("journal", [{ name: "write-ahead log", values: figures.journal_bytes }]);
    this.#charts.journal.element.hidden = !figures.journal_bytes.some(Boolean); // PostgreSQL's is its own business
  }
}
