// One heatmap: Plotly paints the values, a canvas above it what is not a value (no data, stale, NaN,
// dead), and one focusable layer answers pointer and keyboard. The plot is made once and updated in
// place; what the pointer is on is looked up in the newest layout each time, so a fleet that changes
// shape under the pointer cannot leave a stale cell behind.
import { arrange, boxOf, cellAt } from "./arrange.js";
import { EMPTY_SLOT, MISSING, NOT_A_NUMBER, STALE, valueOf } from "./frames.js";
import { ago, ofUnit } from "./format.js";
import { loadPlotly, token } from "./plotly.js";

const OUTLINED = new Set(["unreachable", "failed"]);
const CIVIDIS = new Set(["kv_used_ratio", "prefix_hit_ratio", "generation_tokens_per_second"]);
const GAP_FROM_PIXELS = 6;
const LABEL_PIXELS = 12;
// Thousands of cells are painted every other second: nobody sees more, and it halves the work.
const MANY_CELLS = 4096;
const CALM_MS = 1900;
const NO_ID = "00000000-0000-0000-0000-000000000000";
const REMEMBERED_SECONDS = 600;

export class Heatmap {
  constructor(panel, { open, tip }) {
    this.panel = panel;
    this.open = open;
    this.tip = tip;
    this.stage = panel.querySelector("[data-stage]");
    this.plot = panel.querySelector("[data-plot]");
    this.overlay = panel.querySelector("[data-overlay]");
    this.cells = panel.querySelector("[data-cells]");
    this.cursor = panel.querySelector("[data-cell]");
    this.select = panel.querySelector("[data-map-metric]");
    this.layout = null;
    this.frame = null;
    this.plan = null;
    this.active = null;
    this.hovered = null;
    this.pointer = null;
    this.remembered = new Map();
    this.drawn = "";
    this.reasons = new Map();
    this.select.addEventListener("change", () => { this.remembered.clear(); this.arrange(); });
    this.cells.addEventListener("pointermove", (event) => this.point(event));
    this.cells.addEventListener("pointerleave", () => this.unpoint());
    this.cells.addEventListener("click", (event) => this.clicked(event));
    this.cells.addEventListener("keydown", (event) => this.key(event));
    this.cells.addEventListener("focus", () => this.focused());
    this.cells.addEventListener("blur", () => this.unpoint());
    this.watcher = new ResizeObserver(() => this.arrange());
    this.watcher.observe(this.stage);
    this.inSight = true;
    this.drawnAt = -Infinity;
    this.sight = new IntersectionObserver(([entry]) => {
      this.inSight = entry.isIntersecting;
      if (this.inSight) this.draw();
    });
    this.sight.observe(this.stage);
    document.addEventListener("theme", () => this.arrange());
  }

  get metricIndex() {
    return this.layout ? this.layout.metrics.findIndex((metric) => metric.key === this.select.value) : -1;
  }

  get metric() {
    return this.layout?.metrics[this.metricIndex] ?? null;
  }

  // The frame belongs to the layout, so that cell numbers mean the same in both.
  get isReady() {
    return this.layout !== null && this.frame !== null && this.metric !== null
      && this.frame.layoutVersion === this.layout.version
      && this.frame.statuses.length === this.layout.rows.length * this.layout.columns;
  }

  setLayout(layout) {
    this.layout = layout;
    this.remembered.clear();
    this.reasons.clear();
    this.active = null;
    this.arrange();
  }

  setFrame(frame) {
    this.frame = frame;
    const now = performance.now();
    if (!this.inSight || (frame.statuses.length > MANY_CELLS && now - this.drawnAt < CALM_MS)) return;
    this.drawnAt = now;
    this.draw();
  }

  arrange() {
    this.drawn = "";
    const { clientWidth, clientHeight } = this.stage;
    this.plan = this.layout ? arrange(this.layout.rows, this.layout.columns, clientWidth, clientHeight) : null;
    this.legend();
    this.draw();
  }

  draw() {
    if (!this.isReady || this.plan === null) return this.clear();
    this.stage.classList.remove("waiting");
    this.remember();
    const changed = this.fingerprint();
    if (changed !== this.drawn) {
      this.drawn = changed;
      this.paintValues();
      this.paintRest();
    }
    this.refreshPointer();
    return undefined;
  }

  clear() {
    const known = this.layout !== null;
    const empty = known && (!this.layout.rows.length || !this.layout.columns);
    this.stage.classList.add("waiting");
    this.stage.dataset.waiting = empty ? "No replicas to show yet" : "Waiting for the first frame";
    this.drawn = "";
    this.plotted = null;
    if (window.Plotly && this.plot.data) window.Plotly.purge(this.plot);
    this.overlay.width = 0;
    this.unpoint();
  }

  // What is on the screen, in short: two frames that look alike are drawn once.
  fingerprint() {
    let hash = 17;
    for (const code of this.frame.codes[this.metricIndex]) hash = (Math.imul(hash, 31) + code) | 0;
    for (const status of this.frame.statuses) hash = (Math.imul(hash, 31) + status) | 0;
    return `${hash}/${this.layout.version}/${this.metric.key}`;
  }

  // The last value of each cell, for cells that go stale: they fade, and say how old they are.
  remember() {
    const codes = this.frame.codes[this.metricIndex];
    for (let cell = 0; cell < codes.length; cell += 1) {
      if (codes[cell] !== MISSING && codes[cell] !== STALE) this.remembered.set(cell, { code: codes[cell], at: this.frame.builtAt });
    }
  }

  shownCode(cell) {
    const code = this.frame.codes[this.metricIndex][cell];
    if (code !== STALE) return code;
    const known = this.remembered.get(cell);
    return known && this.frame.builtAt - known.at < REMEMBERED_SECONDS ? known.code : MISSING;
  }

  async paintValues() {
    const Plotly = await loadPlotly();
    if (!this.isReady || this.plan === null) return;
    const { plan } = this;
    const z = Array.from({ length: plan.lines }, () => new Array(plan.columns).fill(null));
    plan.spots.forEach((spot, row) => {
      for (let slot = 0; slot < plan.slots; slot += 1) {
        const value = valueOf(this.shownCode(row * plan.slots + slot), this.metric.scale);
        z[spot.line][spot.column + slot] = Number.isNaN(value) ? null : value;
      }
    });
    const shape = `${plan.columns}x${plan.lines}/${plan.cellWidth}x${plan.cellHeight}/${this.metric.key}`;
    if (this.plotted === shape) await Plotly.restyle(this.plot, { z: [z] }, [0]);
    else await Plotly.react(this.plot, [this.trace(z)], this.plotLayout(), { staticPlot: true, responsive: false });
    this.plotted = shape;
  }

  trace(z) {
    const roomy = Math.min(this.plan.cellWidth, this.plan.cellHeight) >= GAP_FROM_PIXELS;
    return {
      type: "heatmap", z, x0: 0.5, dx: 1, y0: 0.5, dy: 1, zmin: this.metric.low, zmax: this.metric.high,
      colorscale: CIVIDIS.has(this.metric.key) ? "Cividis" : "Viridis", showscale: false, hoverinfo: "skip",
      // Never quite zero: without gaps Plotly scales a small picture up, blurred, by a style attribute
      // that the page's policy refuses.
      xgap: roomy ? 1 : 0.01, ygap: roomy ? 1 : 0.01,
    };
  }

  plotLayout() {
    const { plan } = this;
    const bare = { visible: false, fixedrange: true };
    return {
      width: plan.columns * plan.cellWidth, height: plan.lines * plan.cellHeight,
      margin: { l: 0, r: 0, t: 0, b: 0, pad: 0 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      xaxis: { ...bare, range: [0, plan.columns] }, yaxis: { ...bare, range: [plan.lines, 0] },
    };
  }

  paintRest() {
    const context = this.freshCanvas();
    const colours = { hatch: token("--hatch"), veil: token("--veil"), bad: token("--bad"), warn: token("--warn"), sunken: token("--sunken"), nan: token("--nan"), ink: token("--ink-soft"), surface: token("--surface") };
    const hatch = hatchPattern(context, colours.hatch);
    this.layout.rows.forEach((row, index) => {
      for (let slot = 0; slot < this.plan.slots; slot += 1) this.paintCell(context, index * this.plan.slots + slot, row, colours, hatch);
    });
    this.paintNames(context, colours);
  }

  paintCell(context, cell, row, colours, hatch) {
    const status = this.frame.statuses[cell];
    if (status === EMPTY_SLOT) return;
    const code = this.frame.codes[this.metricIndex][cell];
    const { left, top, width, height } = inner(boxOf(this.plan, cell));
    const shown = this.shownCode(cell);
    if (shown === MISSING) {
      fillBox(context, code === STALE ? colours.sunken : hatch, left, top, width, height);
      if (Math.min(width, height) >= GAP_FROM_PIXELS) border(context, colours.hatch, left, top, width, height);
    }
    if (shown === NOT_A_NUMBER) paintNotANumber(context, colours, left, top, width, height);
    if (code === STALE && shown !== MISSING) fillBox(context, colours.veil, left, top, width, height);
    if (OUTLINED.has(this.layout.statuses[status]) || row.liveness === "dead") outline(context, colours, left, top, width, height);
  }

  // Names of nodes where lines are high enough; names of racks always.
  paintNames(context, colours) {
    const { plan } = this;
    context.textBaseline = "middle";
    context.font = `600 12px ${token("--font")}`;
    context.fillStyle = colours.ink;
    const cut = plan.named ? 0 : commonPrefix(plan.headers.map((header) => this.layout.rows[header.row].rack));
    let above = null;
    for (const header of plan.headers) {
      const crowded = above !== null && above.column === header.column && (header.line - above.line) * plan.cellHeight < LABEL_PIXELS;
      if (crowded) continue;
      above = header;
      this.paintLabel(context, header, this.layout.rows[header.row].rack.slice(cut));
    }
    if (!plan.named) return;
    context.font = `12px ${token("--font")}`;
    this.layout.rows.forEach((row, index) => {
      context.fillStyle = row.liveness === "dead" ? colours.bad : row.liveness === "suspect" ? colours.warn : colours.ink;
      this.paintLabel(context, plan.spots[index], row.name);
    });
  }

  paintLabel(context, spot, text) {
    const { cellWidth, cellHeight, gap, named } = this.plan;
    const top = spot.line * cellHeight + (named ? cellHeight / 2 : Math.max(6, cellHeight));
    context.textAlign = named ? "left" : "right";
    context.fillText(fit(context, text, gap * cellWidth - 8), (spot.column - (named ? gap : 0)) * cellWidth - (named ? 0 : 6), top);
  }

  freshCanvas() {
    const density = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.stage;
    this.overlay.width = clientWidth * density;
    this.overlay.height = clientHeight * density;
    this.overlay.style.width = `${clientWidth}px`;
    this.overlay.style.height = `${clientHeight}px`;
    const context = this.overlay.getContext("2d");
    context.scale(density, density);
    return context;
  }

  legend() {
    const { metric } = this;
    if (!metric) return;
    const find = (name) => this.panel.querySelector(`[data-${name}]`);
    find("ramp").className = `ramp ${CIVIDIS.has(metric.key) ? "scale-cividis" : "scale-viridis"}`;
    find("low").textContent = ofUnit(metric.low, metric.unit);
    find("high").textContent = `≥ ${ofUnit(metric.high, metric.unit)}`;
    if (metric.unit === "ratio") find("high").textContent = ofUnit(metric.high, metric.unit);
    const mark = find("mark");
    const marked = metric.threshold !== null && metric.threshold !== undefined;
    mark.hidden = !marked;
    find("slo").textContent = marked ? `objective ${ofUnit(metric.threshold, metric.unit)}` : "";
    if (marked) mark.style.left = `${(100 * (metric.threshold - metric.low)) / (metric.high - metric.low)}%`;
    const nodes = this.layout.rows.length;
    find("map-size").textContent = `${nodes} node${nodes === 1 ? "" : "s"} × ${this.layout.columns} slots`;
  }

  // Pointer and keyboard ------------------------------------------------------------------------
  replicaIn(cell) {
    if (!this.isReady || cell === null || cell >= this.frame.statuses.length) return null;
    return this.layout.rows[Math.floor(cell / this.layout.columns)]?.cells[cell % this.layout.columns] ?? null;
  }

  point(event) {
    const box = this.stage.getBoundingClientRect();
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
    const code = this.frame.codes[this.metricIndex][cell];
    const value = valueOf(this.shownCode(cell), this.metric.scale);
    const known = this.remembered.get(cell);
    let shown = ofUnit(value, this.metric.unit);
    let why = "";
    if (code === MISSING) { shown = "no data"; why = status === "ready" ? "its engine does not say" : `it is ${status.replaceAll("_", " ")}`; }
    if (code === STALE) why = known ? `stale, last said ${ago(this.frame.builtAt - known.at)}` : "stale";
    if (code === NOT_A_NUMBER) why = "its engine says NaN";
    return {
      title: replica?.name ?? "Empty slot",
      value: `${this.metric.label}: ${shown}${why ? ` (${why})` : ""}`,
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
    const box = this.stage.getBoundingClientRect();
    this.tip.show(this, said, box.left + left + width, box.top + top + height);
  }

  destroy() {
    this.watcher.disconnect();
    this.sight.disconnect();
    if (window.Plotly) window.Plotly.purge(this.plot);
  }
}

// How many characters all names start with, so that narrow labels keep what tells them apart.
function commonPrefix(names) {
  if (names.length < 2) return 0;
  let length = 0;
  while (names.every((name) => length < name.length - 1 && name[length] === names[0][length] && /\D/.test(name[length]))) length += 1;
  return length;
}

function inner({ left, top, width, height }) {
  const gap = Math.min(width, height) >= GAP_FROM_PIXELS ? 0.5 : 0;
  return { left: left + gap, top: top + gap, width: width - 2 * gap, height: height - 2 * gap };
}

function fillBox(context, style, left, top, width, height) {
  context.fillStyle = style;
  context.fillRect(left, top, width, height);
}

function border(context, colour, left, top, width, height) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
}

function outline(context, colours, left, top, width, height) {
  const line = Math.min(width, height) >= 12 ? 2 : 1;
  context.strokeStyle = colours.bad;
  context.lineWidth = line;
  context.strokeRect(left + line / 2, top + line / 2, width - line, height - line);
}

function paintNotANumber(context, colours, left, top, width, height) {
  fillBox(context, colours.surface, left, top, width, height);
  context.strokeStyle = colours.nan;
  context.lineWidth = 1;
  context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
  context.beginPath();
  context.moveTo(left, top);
  context.lineTo(left + width, top + height);
  context.moveTo(left + width, top);
  context.lineTo(left, top + height);
  context.stroke();
}

function hatchPattern(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = 5;
  tile.height = 5;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-5, 0, 5]) {
    pen.moveTo(shift - 1, 6);
    pen.lineTo(shift + 6, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function fit(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}
