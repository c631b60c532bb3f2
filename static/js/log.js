// Live tail of a replica's log: resumes from its last position, says why when it cannot go on.
import { backoff } from "./live.js";
import { seconds } from "./format.js";

const KEPT_LINES = 2000;
const FINAL_CODES = new Set([4401, 4404, 4410]);

class LogTail {
  constructor(element) {
    this.element = element;
    this.lines = element.querySelector("[data-log-lines]");
    this.state = element.querySelector("[data-log-state]");
    this.droppedNote = element.querySelector("[data-log-dropped]");
    this.followButton = element.querySelector("[data-log-follow]");
    this.position = "";
    this.attempt = 0;
    this.engineAttempt = null;
    this.dropped = 0;
    this.following = true;
    this.followButton.addEventListener("click", () => this.setFollowing(!this.following));
    this.lines.addEventListener("wheel", () => this.lookedAt(), { passive: true });
    this.lines.addEventListener("keyup", () => this.lookedAt());
    this.connect();
  }

  lookedAt() {
    const { scrollTop, clientHeight, scrollHeight } = this.lines;
    this.setFollowing(scrollTop + clientHeight > scrollHeight - 24);
  }

  setFollowing(on) {
    this.following = on;
    this.followButton.setAttribute("aria-pressed", String(on));
    this.followButton.textContent = on ? "following" : "follow";
    if (on) this.lines.scrollTop = this.lines.scrollHeight;
  }

  connect() {
    if (!this.element.isConnected) return;
    const scheme = window.location.protocol === "https:" ? "wss" : "ws";
    const query = this.position ? `&after=${encodeURIComponent(this.position)}` : "";
    this.say("connecting");
    this.socket = new WebSocket(`${scheme}://${window.location.host}${this.element.dataset.log}${query}`);
    this.socket.addEventListener("open", () => { this.attempt = 0; this.say("waiting for lines"); });
    this.socket.addEventListener("message", (event) => this.receive(JSON.parse(event.data)));
    this.socket.addEventListener("close", (event) => this.lost(event));
  }

  lost(event) {
    if (this.ended || !this.element.isConnected) return;
    const reason = event.reason || "the connection was lost";
    if (FINAL_CODES.has(event.code)) return this.say(`closed: ${reason}`);
    const wait = event.code === 4429 ? 30000 : backoff(this.attempt, event.code);
    this.attempt += 1;
    this.say(`${reason}; resuming in ${seconds(Math.ceil(wait / 1000))}`);
    this.timer = setTimeout(() => this.connect(), wait);
    return undefined;
  }

  receive(message) {
    this.position = message.position;
    this.say("live");
    if (message.dropped) {
      this.dropped += message.dropped;
      this.droppedNote.textContent = `${this.dropped} lines not shown`;
    }
    const added = document.createDocumentFragment();
    for (const line of message.lines) {
      if (line.attempt !== this.engineAttempt) {
        this.engineAttempt = line.attempt;
        const mark = document.createElement("span");
        mark.className = "attempt";
        mark.textContent = `── attempt ${line.attempt} ──\n`;
        added.append(mark);
      }
      added.append(`${line.text}\n`);
    }
    this.lines.append(added);
    while (this.lines.childNodes.length > KEPT_LINES) this.lines.firstChild.remove();
    if (this.following) this.lines.scrollTop = this.lines.scrollHeight;
  }

  say(text) {
    this.state.textContent = text;
  }

  end() {
    this.ended = true;
    clearTimeout(this.timer);
    this.socket?.close(1000);
  }
}

const tails = new Map();

// Start the tails below an element, and end those whose element is gone.
export function setUpLogs(root = document) {
  for (const [element, tail] of tails) {
    if (!element.isConnected) { tail.end(); tails.delete(element); }
  }
  for (const element of root.querySelectorAll("[data-log]")) {
    if (!tails.has(element)) tails.set(element, new LogTail(element));
  }
}
