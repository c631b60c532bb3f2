// The picture of a heatmap: Plotly paints the values, a canvas above it what is not a value (no data,
// stale, NaN, dead) and the words. The plot is made once and updated in place, and only where a frame
// looks different from the one before.
import { arrange, boxOf } from "./arrange.js";
import { crossBox, fillBox, fit, fitTail, GAP_FROM_PIXELS, hatchPattern, inkOn, inner, levelOf, scaleOf, strokeBox, writeIn } from "./cellpaint.js";
import { EMPTY_SLOT, MISSING, NOT_A_NUMBER, STALE, valueOf } from "./frames.js";
import { ofUnit } from "./format.js";
import { loadPlotly, ownTask, token } from "./plotly.js";

const OUTLINED = new Set(["unreachable", "failed"]);
const LABEL_PIXELS = 12;
const LABEL_GAP = 12;
const TEXT_MIN_WIDTH = 44;
const TEXT_MIN_HEIGHT = 18;
const SLOT_WORD_MIN_WIDTH = 56;
// Thousands of cells are painted every other second: nobody sees more, and it halves the work.
const MANY_CELLS = 1024;
const CALM_MS = 1900;
const REMEMBERED_SECONDS = 600;
const SIMULATED_WORD = " sim";
const SIMULATED_BAR_PIXELS = 3;

export class HeatPicture {
  // `onDrawn` is called after each frame that was looked at, `onCleared` when there is nothing to show.
  constructor(panel, { onDrawn, onCleared }) {
    this.panel = panel;
    this.onDrawn = onDrawn;
    this.onCleared = onCleared;
    this.stage = panel.querySelector("[data-stage]");
    this.plot = panel.querySelector("[data-plot]");
    this.overlay = panel.querySelector("[data-overlay]");
    this.select = panel.querySelector("[data-map-metric]");
    this.layout = null;
    this.frame = null;
    this.plan = null;
    this.remembered = new Map();
    this.painted = null;
    this.levels = null;
    this.plotted = null;
    this.width = 0;
    this.select.addEventListener("change", () => { this.remembered.clear(); this.arrange(); });
    // Its height follows its content, so only another width asks for another arrangement.
    this.watcher = new ResizeObserver(() => { if (this.stage.clientWidth !== this.width) this.arrange(); });
    this.watcher.observe(this.stage);
    this.inSight = true;
    this.drawnAt = -Infinity;
    this.sight = new IntersectionObserver((entries) => {
      this.inSight = entries.at(-1).isIntersecting; // the newest of those that came together
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

  // The frame comes along: cut to the same rows, it can be drawn at once.
  setLayout(layout, frame) {
    this.layout = layout;
    this.frame = frame;
    this.remembered.clear();
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
    this.width = this.stage.clientWidth;
    const most = parseFloat(getComputedStyle(this.stage).maxHeight);
    this.plan = this.layout ? arrange(this.layout.rows, this.layout.columns, this.width, most, this.labelWidths()) : null;
    this.stage.style.height = this.plan ? `${Math.ceil(this.plan.height)}px` : "";
    this.painted = null;
    this.levels = null;
    this.legend();
    this.draw();
  }

  // Measured as wide as the longest by characters; exact enough, and cheap for a thousand names.
  labelWidths() {
    const context = this.overlay.getContext("2d");
    const longest = (names) => names.reduce((long, name) => (name.length > long.length ? name : long), "");
    const measure = (font, text) => { context.font = font; return Math.ceil(context.measureText(text).width) + LABEL_GAP; };
    const family = token("--font");
    return {
      nodes: measure(`12px ${family}`, longest(this.layout.rows.map((row) => row.name + (row.simulated ? SIMULATED_WORD : "")))),
      racks: measure(`600 12px ${family}`, longest(this.layout.rows.map((row) => row.rack))),
    };
  }

  draw() {
    if (!this.isReady || this.plan === null) return this.clear();
    this.stage.classList.remove("waiting");
    this.remember();
    if (this.levelsChanged()) this.paintValues();
    this.paintRest();
    this.onDrawn();
    return undefined;
  }

  clear() {
    const known = this.layout !== null;
    const empty = known && (!this.layout.rows.length || !this.layout.columns);
    this.stage.classList.add("waiting");
    this.stage.dataset.waiting = empty ? "No replicas to show yet" : "Waiting for the first frame";
    this.painted = null;
    this.levels = null;
    this.plotted = null;
    if (window.Plotly && this.plot.data) window.Plotly.purge(this.plot);
    this.overlay.width = 0;
    this.onCleared();
  }

  // The last value of each cell, for cells that go stale: they fade, and say how old they are.
  remember() {
    const codes = this.frame.codes[this.metricIndex];
    for (let cell = 0; cell < codes.length; cell += 1) {
      if (codes[cell] === MISSING || codes[cell] === STALE) continue;
      const known = this.remembered.get(cell);
      if (known) Object.assign(known, { code: codes[cell], at: this.frame.builtAt });
      else this.remembered.set(cell, { code: codes[cell], at: this.frame.builtAt });
    }
  }

  shownCode(cell) {
    const code = this.frame.codes[this.metricIndex][cell];
    if (code !== STALE) return code;
    const known = this.remembered.get(cell);
    return known && this.frame.builtAt - known.at < REMEMBERED_SECONDS ? known.code : MISSING;
  }

  // Whether any cell gets another colour than it has. Level + 1; 0 where there is no value.
  levelsChanged() {
    const levels = new Uint16Array(this.frame.statuses.length);
    for (let cell = 0; cell < levels.length; cell += 1) {
      const value = valueOf(this.shownCode(cell), this.metric.scale);
      levels[cell] = value === null || Number.isNaN(value) ? 0 : levelOf(value, this.metric) + 1;
    }
    const before = this.levels;
    this.levels = levels;
    return before === null || levels.some((level, cell) => level !== before[cell]);
  }

  async paintValues() {
    const Plotly = await loadPlotly();
    if (this.plotted === null) await ownTask();
    if (!this.isReady || this.plan === null) return;
    const { plan } = this;
    const z = Array.from({ length: plan.tops.length - 1 }, () => new Array(plan.lefts.length - 1).fill(null));
    plan.spots.forEach((spot, row) => {
      for (let slot = 0; slot < plan.slots; slot += 1) {
        const value = valueOf(this.shownCode(row * plan.slots + slot), this.metric.scale);
        z[spot.line][spot.column + slot] = Number.isNaN(value) ? null : value;
      }
    });
    if (this.plotted === plan && this.plottedMetric === this.metric.key) await Plotly.restyle(this.plot, { z: [z] }, [0]);
    else await Plotly.react(this.plot, [this.trace(z)], this.plotLayout(), { staticPlot: true, responsive: false });
    this.plotted = plan;
    this.plottedMetric = this.metric.key;
  }

  trace(z) {
    const roomy = Math.min(this.plan.cellWidth, this.plan.cellHeight) >= GAP_FROM_PIXELS;
    return {
      type: "heatmap", z, x: this.plan.lefts, y: this.plan.tops, zmin: this.metric.low, zmax: this.metric.high,
      colorscale: scaleOf(this.metric) === "cividis" ? "Cividis" : "Viridis", showscale: false, hoverinfo: "skip",
      // Never quite zero: without gaps Plotly scales a small picture up, blurred, by a style attribute
      // that the page's policy refuses.
      xgap: roomy ? 1 : 0.01, ygap: roomy ? 1 : 0.01,
    };
  }

  plotLayout() {
    const { width, height } = this.plan;
    const bare = { visible: false, fixedrange: true };
    return {
      width, height, margin: { l: 0, r: 0, t: 0, b: 0, pad: 0 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      xaxis: { ...bare, range: [0, width] }, yaxis: { ...bare, range: [height, 0] },
    };
  }

  // Above the values: everything after a new arrangement, afterwards only cells that look different.
  paintRest() {
    const { statuses } = this.frame;
    const codes = this.frame.codes[this.metricIndex];
    const fresh = this.painted === null;
    const context = fresh ? this.freshCanvas() : this.overlay.getContext("2d");
    if (fresh) {
      this.readColours(context);
      this.paintNames(context);
      this.painted = new Float64Array(statuses.length).fill(-1);
    }
    context.font = `12px ${this.colours.font}`;
    for (let cell = 0; cell < statuses.length; cell += 1) {
      const look = (this.shownCode(cell) * 0x10000 + codes[cell]) * 0x100 + statuses[cell];
      if (look === this.painted[cell]) continue;
      const box = boxOf(this.plan, cell);
      if (!fresh) context.clearRect(box.left, box.top, box.width, box.height);
      this.painted[cell] = look;
      this.paintCell(context, cell, inner(box));
    }
  }

  readColours(context) {
    const names = { veil: "veil", bad: "bad", warn: "warn", sunken: "sunken", nan: "nan", soft: "ink-soft", sim: "sim", ink: "ink", surface: "surface", lines: "hatch", font: "font" };
    this.colours = Object.fromEntries(Object.entries(names).map(([name, key]) => [name, token(`--${key}`)]));
    this.colours.hatch = hatchPattern(context, this.colours.lines);
    this.colours.scale = scaleOf(this.metric);
  }

  paintCell(context, cell, box) {
    const status = this.frame.statuses[cell];
    if (status === EMPTY_SLOT) return;
    const isStale = this.frame.codes[this.metricIndex][cell] === STALE;
    const shown = this.shownCode(cell);
    const { colours } = this;
    if (shown === MISSING) {
      fillBox(context, isStale ? colours.sunken : colours.hatch, box);
      if (Math.min(box.width, box.height) >= GAP_FROM_PIXELS) strokeBox(context, colours.lines, box);
    } else if (shown === NOT_A_NUMBER) {
      fillBox(context, colours.surface, box);
      strokeBox(context, colours.nan, box);
      crossBox(context, colours.nan, box);
    } else if (isStale) fillBox(context, colours.veil, box);
    this.paintWord(context, shown, isStale, box);
    const row = this.layout.rows[Math.floor(cell / this.plan.slots)];
    if (OUTLINED.has(this.layout.statuses[status]) || row.liveness === "dead") {
      strokeBox(context, colours.bad, box, Math.min(box.width, box.height) >= 12 ? 2 : 1);
    }
  }

  // The value in words, where the cell has room for it.
  paintWord(context, shown, isStale, box) {
    if (box.width < TEXT_MIN_WIDTH || box.height < TEXT_MIN_HEIGHT) return;
    const { colours, metric } = this;
    if (shown === MISSING) return writeIn(context, isStale ? "stale" : "no data", box, { ink: colours.soft, plate: isStale ? "" : colours.surface });
    const value = valueOf(shown, metric.scale);
    if (Number.isNaN(value)) return writeIn(context, "NaN", box, { ink: colours.ink, plate: colours.surface });
    const ink = isStale ? colours.ink : inkOn(colours.scale, levelOf(value, metric));
    return writeIn(context, ofUnit(value, metric.unit), box, { ink, plate: "" });
  }

  // Numbers of slots above wide columns, names of nodes beside high lines, names of racks always.
  paintNames(context) {
    const { plan, colours } = this;
    context.textBaseline = "middle";
    this.paintSlots(context);
    this.paintSimulated(context);
    context.font = `${plan.named ? "600 " : ""}12px ${colours.font}`;
    context.fillStyle = plan.named ? colours.ink : colours.soft;
    const cut = plan.named ? 0 : commonPrefix(plan.headers.map((header) => this.layout.rows[header.row].rack));
    let above = null;
    for (const header of plan.headers) {
      const crowded = above !== null && above.column === header.column && plan.tops[header.line] - plan.tops[above.line] < LABEL_PIXELS;
      if (crowded) continue;
      above = header;
      this.paintLabel(context, header, this.layout.rows[header.row].rack.slice(cut) || "no rack");
    }
    if (!plan.named) return;
    context.font = `12px ${colours.font}`;
    this.layout.rows.forEach((row, index) => {
      context.fillStyle = row.liveness === "dead" ? colours.bad : row.liveness === "suspect" ? colours.warn : colours.soft;
      this.paintLabel(context, plan.spots[index], row.name, row.simulated ? SIMULATED_WORD : "");
    });
  }

  // A bar before each line of a simulated node: seen also where lines are too thin for names.
  paintSimulated(context) {
    const { plan, colours } = this;
    context.fillStyle = colours.sim;
    this.layout.rows.forEach((row, index) => {
      if (!row.simulated) return;
      const { line, column } = plan.spots[index];
      const height = plan.tops[line + 1] - plan.tops[line];
      const gap = height >= GAP_FROM_PIXELS ? 0.5 : 0;
      context.fillRect(plan.lefts[column] - SIMULATED_BAR_PIXELS - 1, plan.tops[line] + gap, SIMULATED_BAR_PIXELS, height - 2 * gap);
    });
  }

  paintSlots(context) {
    const { plan, colours } = this;
    if (!plan.head) return;
    context.font = `12px ${colours.font}`;
    context.fillStyle = colours.soft;
    context.textAlign = "center";
    for (let column = 0; column < plan.lefts.length - 1; column += 1) {
      const slot = column % (plan.slots + 1);
      if (!slot) continue;
      context.fillText(plan.cellWidth >= SLOT_WORD_MIN_WIDTH ? `slot ${slot}` : String(slot), plan.lefts[column] + plan.cellWidth / 2, plan.head / 2 - 1);
    }
  }

  paintLabel(context, { line, column }, text, mark = "") {
    const { tops, lefts, label, named } = this.plan;
    const height = tops[line + 1] - tops[line];
    const right = lefts[column];
    context.textAlign = named ? "left" : "right";
    const middle = tops[line] + (named ? height / 2 : Math.max(6, height));
    const room = label - 8 - context.measureText(mark).width;
    const shown = named ? fit(context, text, room) : fitTail(context, text, room);
    context.fillText(shown, named ? right - label : right - 6, middle);
    if (!mark) return;
    context.fillStyle = this.colours.sim;
    context.fillText(mark, right - label + context.measureText(shown).width, middle);
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
    find("ramp").className = `ramp scale-${scaleOf(metric)}`;
    find("low").textContent = ofUnit(metric.low, metric.unit);
    find("high").textContent = `≥ ${ofUnit(metric.high, metric.unit)}`;
    if (metric.unit === "ratio") find("high").textContent = ofUnit(metric.high, metric.unit);
    const mark = find("mark");
    const marked = metric.threshold !== null && metric.threshold !== undefined;
    mark.hidden = !marked;
    find("slo").textContent = marked ? `objective ${ofUnit(metric.threshold, metric.unit)}` : "";
    if (marked) mark.style.left = `${(100 * (metric.threshold - metric.low)) / (metric.high - metric.low)}%`;
    const nodes = this.layout.rows.length;
    const simulated = this.layout.rows.filter((row) => row.simulated).length;
    find("simulated-key").hidden = !simulated;
    find("map-size").textContent = `${nodes} node${nodes === 1 ? "" : "s"} × ${this.layout.columns} slots${simulated ? `, ${simulated === nodes ? "all" : simulated} simulated` : ""}`;
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
  while (names.every((name) => length < name.length - 1 && name[length] === names[0][length] && /[\D0]/.test(name[length]))) length += 1;
  return length;
}
