// One heatmap: the picture, and one focusable layer above it that answers pointer and keyboard. What the
// pointer is on is looked up in the newest layout each time, so a fleet that changes shape under the
// pointer leaves no stale cell behind.
import { boxOf, cellAt } from "./arrange.js";
import { EMPTY_SLOT, MISSING, NOT_A_NUMBER, STALE, valueOf } from "./frames.js";
import { ago, ofUnit } from "./format.js";
import { HeatPicture } from "./heatpicture.js";

const NO_ID = "00000000-0000-0000-0000-000000000000";

export class Heatmap {
  constructor(panel, { open, tip }) {
    this.open = open;
    this.tip = tip;
    this.cells = panel.querySelector("[data-cells]");
    this.cursor = panel.querySelector("[data-cell]");
    this.active = null;
    this.hovered = null;
    this.pointer = null;
    this.reasons = new Map();
    this.picture = new HeatPicture(panel, { onDrawn: () => this.refreshPointer(), onCleared: () => this.unpoint() });
    this.cells.addEventListener("pointermove", (event) => this.point(event));
    this.cells.addEventListener("pointerleave", () => this.unpoint());
    this.cells.addEventListener("click", (event) => this.clicked(event));
    this.cells.addEventListener("keydown", (event) => this.key(event));
    this.cells.addEventListener("focus", () => this.focused());
    this.cells.addEventListener("blur", () => this.unpoint());
  }

  get layout() { return this.picture.layout; }

  get frame() { return this.picture.frame; }

  get plan() { return this.picture.plan; }

  get isReady() { return this.picture.isReady; }

  setLayout(layout, frame) {
    this.reasons.clear();
    this.active = null;
    this.picture.setLayout(layout, frame);
  }

  setFrame(frame) {
    this.picture.setFrame(frame);
  }

  destroy() {
    this.picture.destroy();
  }

  replicaIn(cell) {
    if (!this.isReady || cell === null || cell >= this.frame.statuses.length) return null;
    return this.layout.rows[Math.floor(cell / this.layout.columns)]?.cells[cell % this.layout.columns] ?? null;
  }

  point(event) {
    const box = this.picture.stage.getBoundingClientRect();
    this.pointer = { x: event.clientX - box.left, y: event.clientY - box.top, clientX: event.clientX, clientY: event.clientY };
    this.refreshPointer();
  }

  unpoint() {
    this.pointer = null;
    this.hovered = null;
    this.cells.classList.remove("on-cell");
    this.tip.hide(this);
  }

  refreshPointer() {
    if (this.pointer) {
      this.hovered = this.plan ? cellAt(this.plan, this.pointer.x, this.pointer.y) : null;
      const replica = this.replicaIn(this.hovered);
      this.cells.classList.toggle("on-cell", replica !== null);
      if (this.hovered === null || !this.isReady || (!replica && this.isEmpty(this.hovered))) this.tip.hide(this);
      else this.tip.show(this, this.describe(this.hovered), this.pointer.clientX, this.pointer.clientY);
    } else if (this.active !== null && document.activeElement === this.cells) this.showActive();
  }

  isEmpty(cell) {
    return this.frame.statuses[cell] === EMPTY_SLOT;
  }

  describe(cell) {
    const row = this.layout.rows[Math.floor(cell / this.layout.columns)];
    const replica = this.replicaIn(cell);
    const status = this.layout.statuses[this.frame.statuses[cell]] ?? "empty slot";
    const code = this.frame.codes[this.picture.metricIndex][cell];
    const value = valueOf(this.picture.shownCode(cell), this.picture.metric.scale);
    const known = this.picture.remembered.get(cell);
    let shown = ofUnit(value, this.picture.metric.unit);
    let why = "";
    if (code === MISSING) { shown = "no data"; why = status === "ready" ? "its engine does not say" : `it is ${status.replaceAll("_", " ")}`; }
    if (code === STALE) why = known ? `stale, last said ${ago(this.frame.builtAt - known.at)}` : "stale";
    if (code === NOT_A_NUMBER) why = "its engine says NaN";
    return {
      title: replica?.name ?? "Empty slot",
      value: `${this.picture.metric.label}: ${shown}${why ? ` (${why})` : ""}`,
      lines: [
        `${status.replaceAll("_", " ")}${replica ? ` · ${replica.deployment} · ${replica.model}` : ""}`,
        `node ${row.name} (${row.liveness}${row.simulated ? ", simulated" : ""})${row.rack ? ` · ${row.rack}` : ""}`,
        `measured ${ago(Math.max(0, Date.now() / 1000 + this.tip.clockOffset() - this.frame.builtAt))}`,
        replica ? this.whyOf(replica, status) : "",
      ].filter(Boolean),
    };
  }

  // Why a replica is not ready: asked for once, when somebody looks.
  whyOf(replica, status) {
    if (status === "ready") return "";
    const key = `${replica.id}/${status}`;
    if (!this.reasons.has(key)) {
      this.reasons.set(key, "");
      const url = this.cells.dataset.whyUrl.replace(NO_ID, replica.id);
      fetch(url).then((answer) => (answer.ok && !answer.redirected ? answer.json() : { reason: "" })).then(({ reason }) => {
        this.reasons.set(key, reason);
        this.refreshPointer();
      }).catch(() => this.reasons.delete(key));
    }
    return this.reasons.get(key);
  }

  clicked(event) {
    this.point(event);
    const replica = this.replicaIn(this.hovered);
    if (replica) this.openReplica(this.hovered, replica);
  }

  openReplica(cell, replica) {
    this.active = cell;
    this.tip.hide(this);
    this.open(this.cells.dataset.drawerUrl.replace(NO_ID, replica.id), replica.id, this.cells);
  }

  focused() {
    if (!this.isReady || !this.plan) return;
    if (this.active === null || this.active >= this.frame.statuses.length) this.active = 0;
    if (this.cells.matches(":focus-visible")) this.showActive();
  }

  key(event) {
    if (!this.isReady || !this.plan) return;
    const { columns, rows } = this.layout;
    const last = rows.length * columns - 1;
    const at = Math.min(this.active ?? 0, last);
    const rowStart = at - (at % columns);
    const moves = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns,
      Home: event.ctrlKey ? 0 : rowStart, End: event.ctrlKey ? last : rowStart + columns - 1,
      PageUp: Math.max(at % columns, at - 10 * columns), PageDown: Math.min(last - (columns - 1 - (at % columns)), at + 10 * columns),
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      const replica = this.replicaIn(at);
      if (replica) this.openReplica(at, replica);
    } else if (event.key in moves) {
      event.preventDefault();
      this.active = moves[event.key] >= 0 && moves[event.key] <= last ? moves[event.key] : at;
      this.showActive();
    } else if (event.key === "Escape") this.tip.hide(this);
  }

  showActive() {
    const { left, top, width, height } = boxOf(this.plan, this.active);
    const said = this.describe(this.active);
    const row = Math.floor(this.active / this.layout.columns);
    Object.assign(this.cursor.style, { transform: `translate(${left}px, ${top}px)`, width: `${width}px`, height: `${height}px` });
    this.cursor.setAttribute("aria-label", [said.title, said.value, ...said.lines].join(", "));
    this.cursor.setAttribute("aria-colindex", String((this.active % this.layout.columns) + 1));
    this.cursor.parentElement.setAttribute("aria-rowindex", String(row + 1));
    this.cells.setAttribute("aria-rowcount", String(this.layout.rows.length));
    this.cells.setAttribute("aria-colcount", String(this.layout.columns));
    this.cells.setAttribute("aria-activedescendant", this.cursor.id);
    const box = this.picture.stage.getBoundingClientRect();
    this.tip.show(this, said, box.left + left + width, box.top + top + height);
  }
}
