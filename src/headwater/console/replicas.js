// The SQLite databases that the server keeps. Browsers write every refusal over HTTP on their console, so the list is
// asked for only when it is known that the answer will be one.

import { Refusal, UNAUTHORIZED } from "./connection.js";
import { $, ago, button, bytes, command, complain, fillTable, make, setText, span, tell, whole } from "./show.js";

export const NEWS = "replica.>"; // every new version is a message there
const LOOK_MS = 60_000; // between two looks without news: versions also go, by their age or by hand
const WATCHED_MS = 5_000; // the same while they are looked at: claims come and go without news
const NEWS_MS = 500; // between two looks with news
const REPLICAS_MAX = 200, MESSAGE_CHARS = 120; // shown at most
const IS_HOST = /^headwater_replicas /m; // of the metrics; there before the first replica is
const REFUSED = [401, 403, 404];
const NOTHING = { replicas: [], isCut: false };

export class Replicas {
  #found = NOTHING;
  #isWelcome; // undefined: not known yet
  #isStale = false;
  #isLooking = false;
  #lookedAt = -LOOK_MS;
  #timer = 0;
  #connections = 0;

  constructor(connection) {
    this.connection = connection;
  }

  /** Connected, perhaps to another server, or with another token. */
  begin() {
    this.#connections += 1;
    this.#isWelcome = undefined;
    this.#isLooking = false;
    this.#lookedAt = -LOOK_MS;
  }

  /** There is a new version of one of them. */
  stir() {
    this.#isStale = true;
    if (!this.#isWelcome) return;
    clearTimeout(this.#timer);
    const waitMs = Math.ceil(this.#lookedAt + NEWS_MS - performance.now()) + 1; // timers are a little early
    this.#timer = setTimeout(() => this.lookIfDue(), waitMs);
  }

  /** For a token that may see the dead letters too: the metrics answer few others. */
  async lookIfDue() {
    const waitedMs = performance.now() - this.#lookedAt;
    const lookMs = $("replicas").checkVisibility() ? WATCHED_MS : LOOK_MS;
    const isDue = waitedMs >= (this.#isStale ? NEWS_MS : lookMs) && this.#isWelcome !== false;
    if (isDue && !this.#isLooking && !document.hidden) await this.#look();
    this.#show(); // also what is known: it grows older
  }

  async #look() {
    const connection = this.#connections;
    this.#isLooking = true;
    this.#isStale = false;
    let found = this.#found;
    try {
      const isWelcome = this.#isWelcome ?? (await this.#ask());
      const response = isWelcome ? await this.connection.get("sapi/replicas") : null;
      if (connection !== this.#connections) return;
      this.#isWelcome = isWelcome && !REFUSED.includes(response.status);
      if (!this.#isWelcome) found = NOTHING;
      else if (response.ok) found = await response.json();
    } catch {
      // The connection broke, which is shown elsewhere: the list stays until the next request.
    }
    if (connection !== this.#connections) return;
    this.#found = found;
    this.#isLooking = false;
    this.#lookedAt = performance.now();
  }

  /** Whether this server keeps replicas and all of them may be seen; then we hear of new versions from now on. */
  async #ask() {
    try {
      await this.connection.call("rpc.subscribe", { topic: NEWS });
    } catch (error) {
      if (error.code === UNAUTHORIZED) return false;
      throw error;
    }
    const metrics = await this.connection.get("metrics");
    return !metrics.ok || IS_HOST.test(await metrics.text()); // a proxy may keep them to itself
  }

  /** The versions of one replica, and how to restore one. */
  async #open(replica) {
    $("versions").hidden = false;
    setText($("versions-heading"), replica);
    $("restore").replaceChildren();
    complain("versions-problem");
    try {
      const path = replica.split("/").map(encodeURIComponent).join("/");
      const response = await this.connection.get(`sapi/versions/${path}`);
      if (!response.ok) throw new Refusal(`The server refused the versions of ${replica}.`, await response.text());
      this.#showVersions(replica, await response.json());
    } catch (error) {
      complain("versions-problem", error);
    }
    $("versions").scrollIntoView({ block: "nearest" });
  }

  #showVersions(replica, versions) {
    const server = this.connection.address.href.replace(/rpc$/, "");
    const file = replica.split("/").at(-1);
    const restore = (version) => {
      const text = `headwater replica restore ${server}${replica}@${version} restored-${version}-${file}`;
      const needs = this.connection.isSignedIn ? ", with a token in HEADWATER_TOKEN" : "";
      const textContent = `To restore version ${version} to a file, run${needs}:`;
      $("restore").replaceChildren(make("p", { className: "quiet", textContent }), command(text));
      $("restore").querySelector("code").focus();
    };
    fillTable($("version-rows"), versions, ({ version }) => `${replica}@${version}`, [
      (cell, { version, message }) => {
        if (!cell.firstChild) cell.append(make("strong"), make("span", { className: "sub" }));
        setText(cell.children[0], whole(version));
        setText(cell.children[1], shortened(message ?? ""));
      },
      (cell, { at }) => setText(Object.assign(cell, { title: at }), ago(Date.parse(at))),
      (cell, { size }) => setText(cell, bytes(size)),
      (cell, { changedPages, pages }) => setText(cell, `${whole(changedPages)} of ${whole(pages)}`),
      (cell, { client }) => setText(Object.assign(cell, { title: client ?? "" }), client || "–"),
      (cell, { version }) => cell.firstChild ?? cell.append(button("Restore…", () => restore(version))),
    ]);
  }

  #show() {
    const { replicas, isCut } = this.#found;
    const shown = replicas.slice(0, REPLICAS_MAX), more = replicas.length - shown.length;
    $("replicas").hidden = $("to-replicas").hidden = !replicas.length;
    tell("more-replicas", more ? `and ${isCut ? "more than " : ""}${whole(more)} more` : "");
    fillTable($("replica-rows"), shown, ({ replica }) => replica, [
      (cell, { replica, newest }) => {
        if (!cell.firstChild) {
          cell.append(button(replica, () => this.#open(replica), "link"), make("span", { className: "sub" }));
        }
        setText(cell.children[1], shortened(newest?.message ?? ""));
      },
      (cell, { newest }) => setText(cell, newest ? whole(newest.version) : "–"),
      (cell, { newest }) => {
        if (!cell.firstChild) cell.append(make("time"));
        Object.assign(cell.firstChild, { dateTime: newest?.at ?? "", title: newest?.at ?? "" });
        setText(cell.firstChild, newest ? ago(Date.parse(newest.at)) : "never");
      },
      (cell, { newest }) => setText(cell, newest ? bytes(newest.size) : "–"),
      (cell, { versions }) => setText(cell, whole(versions)),
      (cell, { storedBytes }) => setText(cell, bytes(storedBytes)),
      (cell, { claim }) => {
        if (!cell.firstChild) cell.append(make("span"), make("span", { className: "sub" }));
        cell.title = claim?.client ?? "";
        setText(cell.children[0], claim ? claim.client || "a client" : "–");
        setText(cell.children[1], claim ? `for ${span(Math.max(0, Date.parse(claim.until) - Date.now()))}` : "");
      },
    ]);
  }
}

const shortened = (text) => (text.length > MESSAGE_CHARS ? `${text.slice(0, MESSAGE_CHARS - 1)}…` : text);
