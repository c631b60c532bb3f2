// The fleet page: two heatmaps and the strip of figures.
import { liveLink } from "./live.js";
import { Heatmap } from "./heatmap.js";
import { openDrawer } from "./drawer.js";
import { formats } from "./format.js";
import { Sieve } from "./sieve.js";
import { Tip } from "./tip.js";

function at(object, path) {
  return path.split(".").reduce((value, key) => (value === null || value === undefined ? value : value[key]), object);
}

// The figures: each element names what it shows (data-bind) and how (data-format).
function showSummary(strip, summary) {
  for (const element of strip.querySelectorAll("[data-bind]")) {
    const value = at(summary, element.dataset.bind);
    const text = formats[element.dataset.format](value);
    if (element.textContent !== text) element.textContent = text;
    if (element.dataset.zero) element.dataset.zero = String(!value);
  }
  for (const element of strip.querySelectorAll("[data-simulated]")) element.hidden = !at(summary, element.firstElementChild.dataset.bind);
  for (const element of strip.querySelectorAll("[data-spark]")) drawSpark(element, summary.history?.[element.dataset.spark] ?? []);
}

const SVG = "http://www.w3.org/2000/svg";

function drawSpark(element, values) {
  const { width, height } = element.viewBox.baseVal;
  const top = Math.max(0, ...values.filter((value) => value !== null)) || 1;
  const step = width / Math.max(1, values.length - 1);
  const pieces = [[]];
  values.forEach((value, index) => {
    if (value === null) pieces.push([]);
    else pieces.at(-1).push(`${(index * step).toFixed(1)},${(height - 1 - (value / top) * (height - 2)).toFixed(1)}`);
  });
  const lines = pieces.filter((piece) => piece.length).map((piece) => {
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", piece.join(" "));
    return line;
  });
  element.querySelectorAll("polyline").forEach((line) => line.remove());
  element.append(...lines);
}

function rememberInAddress(name, value) {
  const address = new URL(window.location);
  if (value) address.searchParams.set(name, value);
  else address.searchParams.delete(name);
  window.history.replaceState(null, "", address);
}

const link = liveLink();
link.wantsLayout = true;
const tip = new Tip(document.querySelector("[data-tip]"), link);
const wanted = new URL(window.location).searchParams;

const maps = [...document.querySelectorAll("[data-map]")].map((panel) => {
  const select = panel.querySelector("[data-map-metric]");
  const name = `map${panel.dataset.map}`;
  if ([...select.options].some((option) => option.value === wanted.get(name))) select.value = wanted.get(name);
  select.addEventListener("change", () => rememberInAddress(name, select.value));
  return new Heatmap(panel, {
    tip,
    open: (url, id, opener) => { rememberInAddress("replica", id); openDrawer(url, opener); },
  });
});

// Which nodes the maps show, and in words how many are simulated.
const simulation = document.querySelector("[data-simulation]");
const kinds = [...simulation.querySelectorAll("[data-kind]")];
const sieve = new Sieve(kinds.some((button) => button.dataset.kind === wanted.get("show")) ? wanted.get("show") : "");

function showLayout() {
  const layout = sieve.layout(link.layout);
  const frame = sieve.frame(link.frame);
  maps.forEach((map) => map.setLayout(layout, frame));
  for (const button of kinds) button.setAttribute("aria-pressed", String(button.dataset.kind === sieve.kind));
}

function saySimulation({ rows }) {
  const simulated = rows.filter((row) => row.simulated).length;
  simulation.hidden = !simulated && !sieve.kind;
  simulation.querySelector("[data-simulation-words]").textContent = `${formats.count(simulated)} of ${formats.count(rows.length)} nodes are simulated`;
}

for (const button of kinds) {
  button.addEventListener("click", () => {
    sieve.kind = button.dataset.kind;
    rememberInAddress("show", sieve.kind);
    if (link.layout) showLayout();
  });
}
link.addEventListener("layout", ({ detail }) => { saySimulation(detail); showLayout(); });
link.addEventListener("frame", ({ detail }) => {
  if (document.visibilityState !== "visible") return;
  const frame = sieve.frame(detail);
  maps.forEach((map) => map.setFrame(frame));
});
const strip = document.querySelector("[data-strip]");
link.addEventListener("summary", ({ detail }) => showSummary(strip, detail));
// The link may have been faster than this module: what it got before is shown now.
if (link.frame !== null) {
  maps.forEach((map) => map.setFrame(sieve.frame(link.frame)));
  link.fetchLayout(link.frame.layoutVersion);
}
document.addEventListener("drawer-closed", () => rememberInAddress("replica", ""));
window.addEventListener("pagehide", (event) => { if (!event.persisted) maps.forEach((map) => map.destroy()); });
if (/^[0-9a-f-]{36}$/.test(wanted.get("replica") ?? "")) {
  const url = document.querySelector("[data-cells]").dataset.drawerUrl;
  openDrawer(url.replace("00000000-0000-0000-0000-000000000000", wanted.get("replica")));
}
