// The lake: what the last run and the last audit of the pipeline found, and the charts of its gold tables.

import { Chart } from "./chart.js";
import { $, ago, badge, bytes, command, complain, facts, make, numberOf, setText, span, whole } from "./show.js";

const LOOK_MS = 30_000;
const FORMATS = { count: whole, ms: span, bytes }, BASES = { ms: "ms", bytes: 2 };

export class Lake {
  #lookedAt = -LOOK_MS;
  #drawn = ""; // of which run the charts are

  constructor(connection) {
    this.connection = connection;
  }

  /** The server may be another. */
  begin() {
    this.#lookedAt = -LOOK_MS;
  }

  /** `lastSeq`: of the log, if the token may know it. */
  async lookIfDue(lastSeq) {
    if (performance.now() - this.#lookedAt < LOOK_MS || $("page-lake").hidden) return;
    this.#lookedAt = performance.now();
    try {
      this.#show(await this.connection.call("rpc.lake"), lastSeq && numberOf(lastSeq));
      complain("lake-problem");
    } catch (error) {
      if (!this.connection.isReady) return; // what is known stays
      $("lake").hidden = $("lake-charts").hidden = $("no-lake").hidden = true;
      complain("lake-problem", error);
    }
    $("lake-loading").hidden = true;
  }

  #show(found, lastSeq) {
    $("lake").hidden = $("lake-charts").hidden = !found;
    $("no-lake").hidden = Boolean(found);
    if (!found) {
      const log = $("log").textContent;
      const run = `headwater pipeline run ${log} --lake ./lake`, serve = `headwater serve ${log} --lake ./lake`;
      $("lake-commands").replaceChildren(command(run), command(serve));
      return;
    }
    const ranMs = Date.parse(found.ran_at), upto = `up to seq ${whole(numberOf(found.last_seq))}`;
    setText($("lake-ran"), ago(ranMs));
    setText($("lake-ran-at"), new Date(ranMs).toLocaleString("en-GB"));
    const isKnown = lastSeq !== undefined;
    setText($("lake-behind"), isKnown ? whole(Math.max(0, lastSeq - numberOf(found.last_seq))) : "–");
    setText($("lake-upto"), isKnown ? `${upto} of ${whole(lastSeq)}` : upto);
    setText($("lake-messages"), whole(found.messages));
    setText($("lake-bytes"), `${bytes(found.bytes)} in ${whole(found.tables)} tables`);
    setText($("lake-quarantined"), whole(found.quarantined));
    this.#showAudit(found.audit, numberOf(found.last_seq));
    this.#draw(found);
  }

  #showAudit(audit, lakeSeq) {
    $("lake-audit-tile").classList.toggle("alarm", audit !== null && !audit.whole);
    setText($("lake-audit"), audit === null ? "none" : audit.whole ? "whole" : "broken");
    setText($("lake-audited"), audit === null ? "not compared with the log yet" : ago(Date.parse(audit.checked_at)));
    $("lake-verdict").replaceChildren();
    if (audit === null) {
      const textContent = "An audit proves that the lake holds each message of the log once:";
      const run = `headwater pipeline audit ${$("log").textContent} --lake ./lake`;
      return $("lake-verdict").append(make("p", { className: "quiet", textContent }), command(run));
    }
    const grown = lakeSeq - numberOf(audit.lake_seq);
    $("lake-verdict").append(
      make("p", {}, badge(audit.whole ? "whole" : "broken", audit.whole ? "good" : "bad"), audit.whole
        ? ` Every message up to seq ${whole(numberOf(audit.lake_seq))} is in it exactly once.`
        : ` ${whole(audit.failed.length)} of ${whole(audit.checks)} checks failed.`),
      ...audit.failed.map((textContent) => make("p", { className: "failed-check", textContent })),
      facts({
        checked: `${new Date(audit.checked_at).toLocaleString("en-GB")}, in ${numberOf(audit.seconds)} s`,
        checks: audit.checks,
        "not audited yet": grown > 0 ? `${whole(grown)} seqs that a later run added` : null,
      }));
  }

  #draw(found) {
    if (this.#drawn === found.ran_at) return;
    this.#drawn = found.ran_at;
    const charts = found.charts.map(({ title, unit, from_ms: fromMs, step_ms: stepMs, series }) => {
      const format = FORMATS[unit] ?? whole, isWhole = unit === "count", base = BASES[unit];
      const chart = new Chart(title, { format, base, isWhole, isFilled: series.length === 1 });
      const plain = series.map(({ name, values }) => ({ name, values: values.map(numberOf) }));
      chart.show({ fromMs, stepMs, series: plain });
      return chart.element;
    });
    $("lake-charts").replaceChildren(...charts);
  }
}
