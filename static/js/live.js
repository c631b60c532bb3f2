// The one socket of a page: frames, summaries and events, with reconnection.
//
// Events on the link: "layout" (detail: layout), "frame" (decoded frame), "summary", "events" (array),
// "kv" (KV memory of the node that `watchKv` named), "status" ({level, text, reason}). Nothing is built from deltas: each frame is whole, and after a gap
// in the numbers everything is asked for again.
import { decodeFrame } from "./frames.js";
import { seconds } from "./format.js";

const BASE_MS = 1000;
const CAP_MS = 30000;
const RESTART_SPREAD_MS = 12000;
const TRY_LATER_MS = 20000;
const HIDDEN_MS = 60000;
const RESYNC_MS = 5000;
const AMBER_SECONDS = 3;
const RED_SECONDS = 10;
const REMEMBERED_EVENTS = 2000;
const LOGGED_OUT = 4401;

// Full jitter: anywhere between zero and the ceiling, so that a thousand tabs do not return together.
export function backoff(attempt, code, random = Math.random) {
  const grown = Math.min(CAP_MS, BASE_MS * 2 ** attempt);
  if (code === 1012) return random() * Math.max(grown, RESTART_SPREAD_MS); // the server restarts
  if (code === 1013) return TRY_LATER_MS / 2 + random() * Math.max(grown, TRY_LATER_MS); // it asks for time
  return random() * grown;
}

export class LiveLink extends EventTarget {
  constructor(url, layoutUrl) {
    super();
    this.url = url;
    this.layoutUrl = layoutUrl;
    this.attempt = 0;
    this.frame = null;
    this.layout = null;
    this.lastEventId = null;
    this.seen = new Set();
    this.clockOffset = 0;
    this.lastResync = -Infinity;
    this.watchedNode = null;
    this.everOpen = false;
    this.closedReason = "";
    this.socket = null;
    this.retryAt = 0;
  }

  start() {
    this.connect();
    this.ticker = setInterval(() => this.say(), 1000);
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
    window.addEventListener("online", () => this.retryNow());
    window.addEventListener("offline", () => this.say());
    window.addEventListener("pagehide", () => this.stop());
    window.addEventListener("pageshow", (event) => { if (event.persisted) this.retryNow(); });
  }

  stop() {
    clearTimeout(this.retryTimer);
    const socket = this.socket;
    this.socket = null;
    if (socket) socket.close(1000);
  }

  connect() {
    clearTimeout(this.retryTimer);
    const query = this.lastEventId === null ? "" : `?events_after=${this.lastEventId}`;
    const socket = new WebSocket(this.url + query);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    socket.addEventListener("message", (event) => { if (socket === this.socket) this.receive(event.data); });
    socket.addEventListener("close", (event) => { if (socket === this.socket) this.lost(event); });
  }

  lost(event) {
    this.socket = null;
    // Loaded again, the page becomes the login page, which leads back here.
    if (event.code === LOGGED_OUT) { window.location.reload(); return; }
    this.closedReason = event.reason || (navigator.onLine ? "no connection to the server" : "this machine is offline");
    const wait = backoff(this.attempt, event.code);
    this.attempt += 1;
    this.retryAt = performance.now() + wait;
    this.retryTimer = setTimeout(() => this.connect(), wait);
    this.say();
  }

  retryNow() {
    if (this.socket === null) this.connect();
  }

  visibilityChanged() {
    clearTimeout(this.hiddenTimer);
    if (document.visibilityState === "visible") this.retryNow();
    else this.hiddenTimer = setTimeout(() => this.stop(), HIDDEN_MS);
  }

  receive(data) {
    if (data instanceof ArrayBuffer) return this.receiveFrame(data);
    const message = JSON.parse(data);
    if (message.kind === "hello") this.receiveHello(message);
    else if (message.kind === "layout") this.fetchLayout(message.version);
    else if (message.kind === "summary") this.emit("summary", message.summary);
    else if (message.kind === "events") this.receiveEvents(message);
    else if (message.kind === "kv") this.emit("kv", message);
  }

  receiveHello(message) {
    this.attempt = 0;
    this.everOpen = true;
    this.clockOffset = message.now - Date.now() / 1000;
    if (this.lastEventId === null) this.lastEventId = message.last_event_id;
    this.askForKv();
    this.say();
  }

  // Have the KV memory of a node sent along, over each connection from now on.
  watchKv(nodeId) {
    this.watchedNode = nodeId;
    this.askForKv();
  }

  askForKv() {
    if (this.watchedNode === null || this.socket?.readyState !== WebSocket.OPEN) return;
    this.socket.send(JSON.stringify({ kind: "watch_kv", node: this.watchedNode }));
  }

  receiveFrame(buffer) {
    const frame = decodeFrame(buffer);
    const gap = this.frame !== null && frame.sequence > this.frame.sequence + 1;
    this.frame = frame;
    if (gap) this.resync();
    if (this.layout !== null && frame.layoutVersion !== this.layout.version) this.fetchLayout(frame.layoutVersion);
    this.emit("frame", frame);
    this.say();
  }

  receiveEvents(message) {
    const fresh = message.events.filter((event) => !this.seen.has(event.id));
    for (const event of fresh) {
      this.seen.add(event.id);
      this.lastEventId = Math.max(this.lastEventId ?? 0, event.id);
    }
    while (this.seen.size > REMEMBERED_EVENTS) this.seen.delete(this.seen.values().next().value);
    if (fresh.length || message.lost) this.emit("events", fresh);
  }

  resync() {
    const now = performance.now();
    if (now - this.lastResync < RESYNC_MS || this.socket?.readyState !== WebSocket.OPEN) return;
    this.lastResync = now;
    this.socket.send(JSON.stringify({ kind: "resync" }));
  }

  async fetchLayout(version) {
    if (this.layout?.version === version || this.fetching === version || !this.wantsLayout) return;
    this.fetching = version;
    try {
      const answer = await fetch(this.layoutUrl, { headers: { Accept: "application/json" } });
      if (!answer.ok || !answer.headers.get("content-type")?.includes("json")) return;
      this.layout = await answer.json();
      this.emit("layout", this.layout);
    } catch (error) {
      // The next frame with this version asks again.
      console.info("layout not fetched:", error.message);
    } finally {
      this.fetching = null;
    }
  }

  frameAge() {
    return this.frame === null ? null : Math.max(0, Date.now() / 1000 + this.clockOffset - this.frame.builtAt);
  }

  // How fresh the page is, in a word; the reason says what to look at.
  status() {
    const age = this.frameAge();
    if (this.socket === null || this.socket.readyState !== WebSocket.OPEN) {
      const wait = Math.max(0, this.retryAt - performance.now()) / 1000;
      if (!this.everOpen && this.attempt === 0) return { level: "idle", text: "connecting", reason: "" };
      const reason = `${this.closedReason}; trying again ${wait < 1 ? "now" : `in ${seconds(Math.round(wait))}`}`;
      return { level: age !== null && age < RED_SECONDS ? "warn" : "bad", text: "reconnecting", reason, lost: true };
    }
    if (age === null) return { level: "idle", text: "no frames", reason: "The controllers have published nothing yet: are they running?" };
    if (age >= RED_SECONDS) return { level: "bad", text: seconds(Math.round(age)), reason: `No new frame for ${seconds(Math.round(age))}: the controllers stand still or were stopped`, late: true };
    return { level: age >= AMBER_SECONDS ? "warn" : "good", text: `live · ${Math.round(age)}\u202fs`, reason: "Age of the newest frame" };
  }

  say() {
    if (document.visibilityState === "visible") this.emit("status", this.status());
  }

  emit(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }
}

let link = null;

// The page's link, made at first use.
export function liveLink() {
  if (link === null) {
    const app = document.getElementById("app");
    const scheme = window.location.protocol === "https:" ? "wss" : "ws";
    link = new LiveLink(`${scheme}://${window.location.host}${app.dataset.base}/ws/live/`, app.dataset.layoutUrl);
  }
  return link;
}
