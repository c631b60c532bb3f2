// Rows of lines over one time axis (data-timelines="address"), as small as they can be read. One crosshair
// for all: beside each row stand the values where it is, or the newest ones.
import { MISSING, number, percent, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const RENEW_SECONDS = 60;
const HEIGHT = 44;
const PAD = 3;
const GUTTER = 64; // for the words of the scale, so that no line runs through them
const EDGE = 20;
const TICKS = [5, 10, 15, 30, 60, 120, 240, 360];
const DOT = "m-1.5,0a1.5,1.5 0 1,0 3,0a1.5,1.5 0 1,0 -3,0";
const TICK_PX = 64;
const CLOCK = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const THIN = "\u202f";

function bytes(value) {
  if (value === null || value === undefined) return MISSING;
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${unit === "B" ? Math.round(size) : number(size)}${THIN}${unit}/s`;
    size /= 1024;
  }
  return `${number(size)}${THIN}TiB/s`;
}

const WORDS = {
  ratio: percent,
  seconds,
  requests: (value) => (value === null || value === undefined ? MISSING : number(value)),
  bytes_per_second: bytes,
  watts: (value) => (value === null ? MISSING : `${Math.round(value)}${THIN}W`),
  celsius: (value) => (value === null ? MISSING : `${Math.round(value)}${THIN}°C`),
};

function make(name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function div(className, text = "") {
  const element = document.createElement("div");
  element.className = className;
  if (text) element.textContent = text;
  return element;
}

// A scale ends at a round number, so that its label is short.
function niceTop(peak, unit) {
  if (!(peak > 0)) return 1;
  const base = unit === "bytes_per_second" ? 1024 ** Math.floor(Math.log(peak) / Math.log(1024)) : 1;
  const rest = peak / base;
  const power = 10 ** Math.floor(Math.log10(rest));
  return base * power * [1, 2, 5, 10].find((step) => rest <= step * power);
}

class Timelines {
  constructor(element) {
    this.element = element;
    this.index = null;
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerdown", (event) => this.point(event));
    element.addEventListener("pointerleave", () => this.show(null));
    element.addEventListener("blur", () => this.show(null));
    element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => { if (this.data && this.width !== this.measure()) this.draw(); }).observe(element);
    this.load();
    setInterval(() => { if (document.visibilityState === "visible") this.load(); }, RENEW_SECONDS * 1000);
  }

  async load() {
    const answer = await fetch(this.element.dataset.timelines).catch(() => null);
    if (!answer?.ok || answer.redirected) {
      if (!this.data) this.element.replaceChildren(div("soft", "What was recorded could not be read. It is tried again in a minute."));
      return;
    }
    this.data = await answer.json();
    this.draw();
  }

  measure() {
    return this.element.querySelector(".timeline-plot")?.clientWidth ?? 0;
  }

  draw() {
    const { rows, missing } = this.data;
    if (!rows.length) {
      this.element.replaceChildren(div("soft", "Nothing has been recorded in this time yet: each minute is written when it is over."));
      return;
    }
    this.parts = rows.map((row) => this.frame(row));
    this.axis = div("timeline timeline-axis");
    this.axis.append(div("timeline-name"), div("timeline-plot"), div("timeline-value"));
    this.element.replaceChildren(...this.parts.map((part) => part.frame), this.axis);
    if (missing) this.element.append(div("soft small", missing));
    this.width = this.measure();
    for (const part of this.parts) this.plot(part);
    this.ticks();
    this.show(this.index);
  }

  frame(row) {
    const frame = div("timeline");
    const name = div("timeline-name");
    const title = document.createElement("b");
    title.textContent = row.title;
    name.append(title);
    if (row.hint) name.title = row.hint;
    const value = div("timeline-value");
    const plot = div("timeline-plot");
    frame.append(name, plot, value);
    return { row, frame, plot, value };
  }

  x(index) {
    const last = this.data.at.length - 1;
    return GUTTER + (last > 0 ? index / last : 0.5) * (this.width - GUTTER - PAD);
  }

  plot(part) {
    const { row } = part;
    const known = row.lines.flatMap((line) => line.values).filter((value) => value !== null);
    const top = row.top ?? niceTop(Math.max(...known), row.unit);
    const y = (value) => HEIGHT - PAD - (Math.min(value, top) / top) * (HEIGHT - 2 * PAD);
    const svg = make("svg", { width: this.width, height: HEIGHT, role: "img", "aria-label": this.describe(row, known) });
    svg.append(make("line", { class: "base", x1: GUTTER, x2: this.width, y1: HEIGHT - PAD, y2: HEIGHT - PAD }));
    if (row.threshold !== null) {
      svg.append(make("line", { class: "threshold", x1: GUTTER, x2: this.width, y1: y(row.threshold), y2: y(row.threshold) }));
      svg.append(make("text", { class: "threshold-word", x: GUTTER - 6, y: y(row.threshold) + 4, "text-anchor": "end" }, WORDS[row.unit](row.threshold)));
    }
    // The first is drawn last: it stands in front.
    [...row.lines.entries()].reverse().forEach(([place, line]) => svg.append(this.path(line, y, row.of_cards ? "of-cards" : `line-${place + 1}`)));
    if (row.threshold === null) svg.append(make("text", { class: "scale", x: GUTTER - 6, y: 11, "text-anchor": "end" }, WORDS[row.unit](top)));
    part.cross = make("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
    svg.append(part.cross);
    part.plot.replaceChildren(svg);
  }

  // Lines part where a minute is missing; a lone minute is a small ring.
  path(line, y, className) {
    const parts = [];
    let begun = false;
    line.values.forEach((value, index) => {
      if (value === null) { begun = false; return; }
      const place = `${this.x(index).toFixed(1)},${y(value).toFixed(1)}`;
      const isLone = !begun && (line.values[index + 1] ?? null) === null;
      parts.push(begun ? `L${place}` : isLone ? `M${place}${DOT}` : `M${place}`);
      begun = true;
    });
    return make("path", { class: `trace ${className}`, d: parts.join("") });
  }

  describe(row, known) {
    const words = WORDS[row.unit];
    return `${row.title}: between ${words(Math.min(...known))} and ${words(Math.max(...known))}`;
  }

  ticks() {
    const minutes = (this.data.step_seconds * (this.data.at.length - 1)) / 60;
    const every = TICKS.find((tick) => (minutes / tick) * TICK_PX <= this.width - GUTTER) ?? TICKS.at(-1);
    const svg = make("svg", { width: this.width, height: 16, "aria-hidden": "true" });
    this.data.at.forEach((text, index) => {
      const at = new Date(text);
      if ((at.getHours() * 60 + at.getMinutes()) % every) return;
      const x = this.x(index);
      for (const part of this.parts) part.plot.firstChild.prepend(make("line", { class: "grid", x1: x, x2: x, y1: 0, y2: HEIGHT }));
      if (x <= this.width - EDGE) svg.append(make("text", { class: "scale", x, y: 12, "text-anchor": "middle" }, at.toLocaleTimeString([], CLOCK)));
    });
    // A span too short for a round time has its ends named.
    const last = this.data.at.length - 1;
    const ends = svg.hasChildNodes() ? [] : last > 0 ? [[0, "start"], [last, "end"]] : [[last, "middle"]];
    for (const [index, anchor] of ends) {
      const words = new Date(this.data.at[index]).toLocaleTimeString([], CLOCK);
      svg.append(make("text", { class: "scale", x: this.x(index), y: 12, "text-anchor": anchor }, words));
    }
    this.axis.querySelector(".timeline-plot").replaceChildren(svg);
  }

  point(event) {
    const box = this.axis?.querySelector(".timeline-plot").getBoundingClientRect();
    if (!box || event.clientX < box.left + GUTTER - EDGE || event.clientX > box.right + EDGE) { this.show(null); return; }
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - PAD);
    this.show(this.within(Math.round(share * (this.data.at.length - 1))));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.data?.rows.length) return;
    event.preventDefault();
    const last = this.data.at.length - 1;
    this.show(this.within((this.index ?? last + (step > 0 ? 0 : 1)) + step));
  }

  within(index) {
    return Math.max(0, Math.min(this.data.at.length - 1, index));
  }

  show(index) {
    this.index = index;
    if (!this.parts) return;
    const moment = index === null ? "" : new Date(this.data.at[index]).toLocaleTimeString([], CLOCK);
    this.axis.querySelector(".timeline-value").textContent = moment || "newest";
    for (const { row, cross, value } of this.parts) {
      cross.setAttribute("visibility", index === null ? "hidden" : "visible");
      if (index !== null) { cross.setAttribute("x1", this.x(index)); cross.setAttribute("x2", this.x(index)); }
      value.replaceChildren(...(row.of_cards ? this.worst(row, index) : this.each(row, index)));
    }
  }

  at(line, index) {
    return index === null ? line.values.findLast((value) => value !== null) ?? null : line.values[index];
  }

  each(row, index) {
    return row.lines.map((line, place) => {
      const element = document.createElement("span");
      element.className = `word line-${place + 1}`;
      element.textContent = `${WORDS[row.unit](this.at(line, index))}${line.name ? ` ${line.name}` : ""}`;
      return element;
    });
  }

  // Of many cards the one to look at.
  worst(row, index) {
    let most = null;
    let who = null;
    for (const line of row.lines) {
      const value = this.at(line, index);
      if (value !== null && (most === null || value > most)) { most = value; who = line; }
    }
    const element = document.createElement("span");
    element.className = "word of-cards";
    element.textContent = WORDS[row.unit](most);
    const name = document.createElement("span");
    name.className = "soft";
    name.textContent = who ? `${row.lines.length > 1 ? "most: " : ""}${who.name}` : "";
    return [element, name];
  }
}

document.querySelectorAll("[data-timelines]").forEach((element) => new Timelines(element));
