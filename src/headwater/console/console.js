// The page: what the server says into it, what is asked in it to the server.

import { DeadLetters } from "./dead_letters.js";
import { Connection, Refusal } from "./connection.js";
import { Lake } from "./lake.js";
import { Messages, readField, takesJson } from "./messages.js";
import { OverTime } from "./over_time.js";
import { NEWS, Replicas } from "./replicas.js";
import { Subscriptions } from "./subscriptions.js";
import {
  $, Growth, ago, bytes, clock, complain, containing, facts, fillTable, make, numberOf, pretty, preview, setText,
  textOf, titled, unfolding, whole,
} from "./show.js";

const LOOK_MS = 2_000, LOOK_MS_MAX = 10_000; // between two looks at the statistics
const LOOK_SHARE = 4; // so many times as long as the last look took, within these: a large log is not kept busy by us
const ANSWER_MS_MAX = 40_000; // a request that takes longer counts as a lost connection
const TAIL_MAX = 200, TOPICS_MAX = 100; // shown at most

// What the box for any method suggests, with params as an example. The server has more of them; see its documentation.
const METHODS = {
  "rpc.dead_letters": '{"limit": 10}',
  "rpc.dead_letters.get": '{"id": 1}',
  "rpc.dead_letters.groups": "",
  "rpc.dead_letters.stats": "",
  "rpc.health": "",
  "rpc.last_seq": "",
  "rpc.maintenance.run": "",
  "rpc.message": '{"sequence_id": 1}',
  "rpc.messages": '{"topic": "orders.>", "where": "data.order == 17"}',
  "rpc.publish": '{"topic": "orders.new", "data": {"order": 17}}',
  "rpc.publish.batch": '{"messages": [{"topic": "orders.new", "data": 1}, {"topic": "orders.new", "data": 2}]}',
  "rpc.retain": '{"topic": "logs.>", "max_age": 86400}',
  "rpc.retention": "",
  "rpc.retention.remove": '{"topic": "logs.>"}',
  "rpc.seek": '{"subscription_id": "billing", "start": "first"}',
  "rpc.stats": "",
  "rpc.subscribe": '{"topic": "orders.*"}',
  "rpc.subscribe.persistent": '{"subscription_id": "billing", "topic": "orders.>"}',
  "rpc.subscription": '{"subscription_id": "billing"}',
  "rpc.topic_max_seq": '{"topic": "orders.new"}',
};

// --- the connection --------------------------------------------------------------------------------------------------

const address = new URL("rpc", location.href);
address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
address.search = address.hash = "";

const connection = new Connection(address, {
  state(name, text) {
    $("connection").dataset.state = name;
    setText($("state"), text);
    $("retry").hidden = name !== "waiting";
    if (name !== "connected") isListening = false;
  },
  ready(welcome, isBack) {
    $("token").hidden = true;
    setText($("log"), welcome.log);
    setText($("version"), welcome.version);
    showRights(welcome.label);
    $("pages").hidden = false;
    route();
    if (isBack && $("tail").firstChild) {
      const textContent = "Connected again. What came meanwhile is not here.";
      $("tail").prepend(make("li", { className: "note", textContent }));
    }
    letters.begin();
    replicas.begin();
    overTime.begin();
    lake.begin();
    if (connection.may("read")) listen(connection.may("read-all") || pattern !== ">" ? pattern : firstReadable());
    messages.lookIfShown();
    if (connection.may("read")) messages.route();
    look();
  },
  token(error) {
    messages.clear();
    $("token").hidden = false;
    $("signed-in").hidden = true;
    $("tail").replaceChildren(); // what the next token may not read
    $("pages").hidden = true;
    setText($("log"), "");
    complain("token-problem", error);
    $("token-text").focus();
  },
  notification(message) {
    const isLive = message.method === "rpc.notification" && patterns.has(message.params.pattern);
    if (isLive && message.params.pattern === NEWS) replicas.stir();
    if (isLive && message.params.pattern === pattern) hear(message.params);
    if (isLive) return;
    $("answer").append(pretty(message)); // the answer to a call typed there
    while ($("answer").children.length > TAIL_MAX) $("answer").firstChild.remove();
  },
});

const messages = new Messages(connection, () => look());
const letters = new DeadLetters(connection), replicas = new Replicas(connection);
const overTime = new OverTime(connection), lake = new Lake(connection);
const subscriptions = new Subscriptions(connection, () => look());

// --- pages -----------------------------------------------------------------------------------------------------------

const FIRST_PAGE = "overview";
const RIGHTS = ["publish", "read", "consume", "manage", "manage-all", "admin", "watch"];

/** Elements with the attribute `data-right` are shown if the token grants it; console.css hides the others. */
function showRights(label) {
  document.body.dataset.rights = RIGHTS.filter((right) => connection.may(right)).join(" ");
  $("signed-in").hidden = !connection.isSignedIn;
  setText($("label"), label ?? "");
}

function firstReadable() {
  return ($("pattern").value = connection.rights.read[0]);
}

/** Show the page that the address names, if the token may see it. */
function route() {
  const links = [...$("pages").querySelectorAll("a")];
  const [page] = location.hash.split("/"); // behind it may be the seq of a message
  const wanted = links.find((each) => each.hash === page && each.checkVisibility());
  const current = wanted ?? links.find((each) => each.checkVisibility()) ?? links[0];
  const isNew = !current.hasAttribute("aria-current");
  for (const each of links) {
    const isCurrent = each === current;
    if (isCurrent) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
    $(`page-${each.hash.slice(1)}`).hidden = !isCurrent;
  }
  if (isNew) $("pages").scrollLeft = current.offsetLeft - $("pages").clientWidth / 3; // on a phone not all fit
  const name = current.hash.slice(1) === FIRST_PAGE ? "" : `${current.firstChild.textContent} · `;
  document.title = `${name}${$("log").textContent || "Headwater"} · Headwater`;
}

addEventListener("hashchange", ({ oldURL }) => {
  route();
  messages.lookIfShown();
  if (new URL(oldURL).hash.split("/")[0] !== location.hash.split("/")[0]) scrollTo(0, 0);
  messages.route();
  look();
});

$("retry").onclick = () => connection.connect();
$("sign-out").onclick = () => location.reload(); // the token and what it showed are in the memory of this page alone
$("token-form").onsubmit = (event) => {
  event.preventDefault();
  const token = $("token-text").value.trim();
  $("token-text").value = "";
  connection.connect(token);
};
setInterval(() => {
  const seconds = Math.max(0, Math.ceil((connection.retryAt - Date.now()) / 1000));
  if (!$("retry").hidden) setText($("retry"), `Try now (${seconds} s)`);
}, 500);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  if ($("retry").hidden) look();
  else connection.connect();
});

// --- looking: tiles, topics, subscriptions ---------------------------------------------------------------------------

const ofLog = new Growth(), ofTopics = new Map();
let topics = [];
let isLooking = false, lookTimer = 0;

async function look() {
  clearTimeout(lookTimer);
  if (isLooking || !connection.isReady || document.hidden) return;
  isLooking = true;
  const began = performance.now();
  const watchdog = setTimeout(() => connection.lose("the server does not answer"), ANSWER_MS_MAX);
  try {
    const mayLook = connection.may("read") || connection.may("manage");
    const statistics = mayLook ? await connection.call("rpc.stats") : null;
    if (statistics) showStatistics(statistics);
    complain("overview-problem");
    if (connection.may("manage")) await letters.lookIfDue(statistics); // each of these says itself what it could not do
    if (connection.may("watch")) await Promise.all([overTime.lookIfDue(), lake.lookIfDue(statistics?.last_seq)]);
    if (connection.may("watch") && connection.may("read-all")) await replicas.lookIfDue();
    $("main").dataset.sight = "all";
    route(); // the pages there are depend on what was found
  } catch (error) {
    if (connection.isReady) complain("overview-problem", error);
  } finally {
    clearTimeout(watchdog);
    isLooking = false;
    const wait = LOOK_SHARE * (performance.now() - began);
    lookTimer = setTimeout(look, Math.min(Math.max(wait, LOOK_MS), LOOK_MS_MAX));
  }
}

function showRate(lastSeq) {
  ofLog.note(numberOf(lastSeq));
  setText($("rate"), ofLog.rateText);
  ofLog.draw($("rate-curve"));
}

function showStatistics(statistics) {
  const { subscriptions: all } = statistics;
  topics = statistics.topics.map(([topic, total, size, , publishedMs]) => ({ topic, total, size, publishedMs }));
  showRate(statistics.last_seq);
  const newestMs = topics.reduce((newest, { publishedMs }) => Math.max(newest, publishedMs), 0);
  const lag = all.reduce((sum, each) => sum + each.lag, 0), isLeast = all.some((each) => each.lag_is_least);
  setText($("messages"), whole(statistics.messages));
  setText($("bytes"), bytes(statistics.bytes));
  setText($("topic-count"), whole(topics.length));
  setText($("newest"), newestMs ? `last message ${ago(newestMs)}` : "");
  setText($("subscription-count"), whole(all.length));
  overTime.hasSubscriptions = all.length > 0;
  setText($("lag"), all.length ? `${isLeast ? "≥ " : ""}${whole(lag)} behind` : "");
  const gone = new Set(ofTopics.keys());
  for (const { topic, total } of topics) {
    if (!gone.delete(topic)) ofTopics.set(topic, new Growth());
    ofTopics.get(topic).note(total);
  }
  gone.forEach((topic) => ofTopics.delete(topic));
  showTopics();
  messages.note(numberOf(statistics.last_seq));
  subscriptions.show(all);
}

const byName = (name) => (a, b) => (a[name] < b[name] ? -1 : 1);
const byMost = (name) => (a, b) => b[name] - a[name];

function showTopics() {
  const none = "No topics yet. The first message makes the first one.";
  const found = containing("topic", topics, ({ topic }) => [topic], none);
  const shown = found.sort(byMost("publishedMs")).slice(0, TOPICS_MAX);
  setText($("topics-note"), shown.length < found.length ? `the latest ${TOPICS_MAX} of ${whole(found.length)}` : "");
  shown.sort(byName("topic"));
  if (shown.map(({ topic }) => topic).join() !== [...$("known-topics").children].map(({ value }) => value).join()) {
    $("known-topics").replaceChildren(...shown.map(({ topic }) => make("option", { value: topic })));
  }
  const mayOpen = connection.may("read") || connection.may("publish"); // else there is no page of messages
  fillTable($("topic-rows"), shown, ({ topic }) => topic, [
    (cell, { topic }) => {
      const name = mayOpen ? "BUTTON" : "SPAN";
      if (cell.firstChild?.tagName === name) return;
      cell.replaceChildren(mayOpen ? topicButton(topic) : make("span", { textContent: topic }));
    },
    (cell, { total }) => setText(cell, whole(total)),
    (cell, { size }) => setText(cell, bytes(size)),
    (cell, { publishedMs }) => setText(cell, ago(publishedMs)),
    (cell, { topic }) => setText(cell, ofTopics.get(topic).rateText),
    (cell, { topic }) => ofTopics.get(topic).draw(cell),
  ]);
}

function topicButton(topic) {
  const onclick = () => {
    $("topic").value = $("pattern").value = topic;
    listen(topic);
    messages.browse(topic);
    location.hash = "messages";
  };
  return make("button", { type: "button", className: "link", textContent: topic, title: "Show its messages", onclick });
}

$("topic-filter").oninput = showTopics;

// --- live ------------------------------------------------------------------------------------------------------------

const unseen = []; // heard, not shown yet
const patterns = new Set([NEWS]); // all that were listened to: what still comes for an old one is not shown
let pattern = $("pattern").value, isListening = false, isPaused = false, isPainting = false, heard = 0;

async function listen(wanted) {
  if (!isListening) pattern = wanted;
  patterns.add(wanted);
  try {
    await connection.call("rpc.subscribe", { topic: wanted }); // if it is refused, the old one goes on
    const before = isListening ? pattern : wanted;
    [pattern, isListening] = [wanted, true];
    complain("live-problem");
    if (before !== wanted && before !== NEWS) await connection.call("rpc.unsubscribe", { topic: before });
  } catch (error) {
    complain("live-problem", error);
  }
}

function hear(message) {
  heard += 1;
  unseen.push(message);
  if (unseen.length > TAIL_MAX) unseen.shift();
  if (!isPainting) requestAnimationFrame(paint); // however many come, once a frame
  isPainting = true;
}

function paint() {
  isPainting = false;
  setText($("heard"), heard ? `${whole(heard)} heard` : "");
  setText($("pause"), isPaused ? `Resume (${unseen.length}${unseen.length === TAIL_MAX ? "+" : ""} new)` : "Pause");
  if (isPaused) return;
  $("tail").prepend(...unseen.splice(0).map(messageItem).reverse());
  while ($("tail").children.length > TAIL_MAX) $("tail").lastChild.remove();
}

function messageItem({ topic, sequence_id: seq, timestamp, id, headers, data }) {
  const summary = make("summary", {},
    make("time", { textContent: clock(timestamp), title: timestamp }),
    make("strong", { textContent: topic }),
    make("span", { className: "seq", textContent: `#${textOf(seq)}` }),
    make("code", { textContent: preview(JSON.stringify(data)) }));
  const isBare = !Object.keys(headers).length;
  return make("li", {}, unfolding(summary, () => [
    facts({ id, published: timestamp }),
    ...(isBare ? [] : titled("Headers", pretty(headers))),
    ...titled("Data", pretty(data)),
  ]));
}

$("live-form").onsubmit = (event) => {
  event.preventDefault();
  listen($("pattern").value.trim());
};
$("pause").onclick = () => {
  isPaused = !isPaused;
  paint();
};
$("clear").onclick = () => {
  $("tail").replaceChildren();
  unseen.length = heard = 0;
  paint();
};

// --- calling ---------------------------------------------------------------------------------------------------------

takesJson($("params"));

$("call-form").onsubmit = async (event) => {
  event.preventDefault();
  complain("call-problem");
  try {
    const request = connection.requestOf($("method").value.trim(), readField($("params")));
    $("request").replaceChildren(pretty(request));
    $("answer").replaceChildren();
    setText($("took"), "");
    const began = performance.now();
    const answer = await connection.exchange(request);
    $("answer").prepend(pretty(answer));
    setText($("took"), `answered in ${(performance.now() - began).toFixed(1)} ms`);
  } catch (error) {
    complain("call-problem", error);
  }
};

$("known-methods").append(...Object.keys(METHODS).map((value) => make("option", { value })));
$("method").oninput = () => ($("params").placeholder = METHODS[$("method").value.trim()] ?? "");
setText($("url"), ($("connection").title = address.href));
connection.connect();
