// JSON-RPC over one WebSocket that reconnects: calls out, notifications in.

import { bytes, readJson } from "./show.js";

const RETRY_MS = 500, RETRY_MS_MAX = 15_000;
const ANSWER_MS_MAX = 20_000; // over HTTP
const METHOD_NOT_FOUND = -32601;
export const UNAUTHORIZED = -32000;

/** An error answer with its reason and, if known, the next step; the caller shows it beside its form. */
export class Refusal extends Error {
  constructor(why, next, { code, where } = {}) {
    super(why);
    Object.assign(this, { next, code, where });
  }
}

export class Connection {
  #socket = null;
  #token = ""; // here and nowhere else
  #waiting = new Map(); // calls without an answer, by id
  #lastId = 0;
  #frameBytesMax = Infinity;
  #failures = 0;
  #retryTimer = 0;
  #ending = new AbortController();
  #reason = ""; // why the server closed the last connection
  retryAt = 0;
  isReady = false; // greeted, and let in
  rights = {}; // those the token grants: patterns or names by right, and `admin`

  /** `on` has `state(name, text)`, `ready(welcome, isBack)`, `token(error)` and `notification(message)`. */
  constructor(address, on) {
    this.address = address;
    this.on = on;
  }

  connect(token = this.#token) {
    this.#token = token;
    this.#hangUp();
    this.on.state("connecting", "Connecting");
    const socket = (this.#socket = new WebSocket(this.address));
    socket.onopen = () => this.#greet().catch((error) => this.#socket === socket && this.lose(error.message));
    socket.onmessage = ({ data }) => [readJson(data)].flat().forEach((message) => this.#receive(message));
    socket.onclose = ({ reason }) => this.lose(reason);
  }

  /** Whether the token grants a right for something; with `-all`, for all topics. To watch is to see the whole log. */
  may(right) {
    if (right === "watch") return this.may("manage-all") || this.may("admin");
    const [name, isAll] = right.split("-");
    return isAll ? Boolean(this.rights[name]?.includes(">")) : name in this.rights;
  }

  get isSignedIn() {
    return Boolean(this.#token);
  }

  /** The connection is broken: reconnect, with a growing delay. */
  lose(reason) {
    this.#hangUp();
    this.#reason = reason;
    const ms = Math.min(RETRY_MS * 2 ** this.#failures++, RETRY_MS_MAX) * (0.75 + Math.random() / 2);
    this.retryAt = Date.now() + ms;
    this.#retryTimer = setTimeout(() => this.connect(), ms);
    this.on.state("waiting", reason ? `Not connected: ${reason}` : "Not connected");
  }

  async call(method, params) {
    const { result, error } = await this.exchange(this.requestOf(method, params));
    if (!error) return result;
    const { why = error.message, next, where } = error.data ?? {};
    throw new Refusal(why, next, { code: error.code, where });
  }

  /** Over HTTP, beside this page, with the same token, and as long as the connection lasts. */
  async get(path) {
    const headers = this.#token ? { Authorization: `Bearer ${this.#token}` } : {};
    const signal = AbortSignal.any([this.#ending.signal, AbortSignal.timeout(ANSWER_MS_MAX)]);
    return fetch(path, { headers, cache: "no-store", signal });
  }

  requestOf(method, params) {
    return { jsonrpc: "2.0", id: ++this.#lastId, method, params };
  }

  exchange(request) {
    return new Promise((resolve, reject) => {
      const text = JSON.stringify(request);
      if (this.#socket?.readyState !== WebSocket.OPEN) throw new Refusal("There is no connection.", "See above.");
      if (new Blob([text]).size > this.#frameBytesMax) {
        throw new Refusal(`The server takes at most ${bytes(this.#frameBytesMax)} at once.`, "Send less.");
      }
      this.#waiting.set(request.id, { resolve, reject });
      this.#socket.send(text);
    });
  }

  async #greet() {
    let welcome = await this.call("rpc.hello", { client: "console" });
    this.#frameBytesMax = welcome.frame_bytes_max;
    if (!welcome.authenticated) {
      if (!this.#token) return this.#wantToken();
      try {
        await this.call("rpc.authenticate", { token: this.#token });
      } catch (error) {
        if (error.code !== UNAUTHORIZED) throw error;
        const isOver = this.#reason.startsWith("the token"); // else it was never good
        return this.#wantToken(isOver ? new Refusal(`${this.#reason}.`, "Sign in with another one.") : error);
      }
      welcome = await this.call("rpc.hello", { client: "console" }); // now with the log and the rights
    }
    this.rights = welcome.rights ?? {};
    this.#reason = "";
    const isBack = this.#failures > 0;
    this.#failures = 0;
    this.isReady = true;
    this.on.state("connected", "Connected");
    this.on.ready(welcome, isBack);
  }

  #wantToken(error) {
    this.#token = this.#reason = "";
    this.#hangUp(); // the server lets strangers go after a while; we come back with a token
    this.on.state("token", "Waiting for a token");
    this.on.token(error);
  }

  #hangUp() {
    clearTimeout(this.#retryTimer);
    this.#ending.abort();
    this.#ending = new AbortController();
    if (this.#socket) {
      this.#socket.onopen = this.#socket.onmessage = this.#socket.onclose = null;
      this.#socket.close();
    }
    this.#socket = null;
    this.isReady = false;
    const unknown = new Refusal("The connection was lost before the answer came.", "It may have been done.");
    this.#waiting.forEach(({ reject }) => reject(unknown));
    this.#waiting.clear();
  }

  #receive(message) {
    if (!("method" in message)) {
      this.#waiting.get(message.id)?.resolve(message);
      this.#waiting.delete(message.id);
    } else if ("id" in message) {
      const error = { code: METHOD_NOT_FOUND, message: "the console offers no methods" };
      this.#socket.send(JSON.stringify({ jsonrpc: "2.0", id: message.id, error }));
    } else {
      this.on.notification(message);
    }
  }
}
