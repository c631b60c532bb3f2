// Figures that the server describes (data-figure="address"): Plotly draws them in the theme's colours.
import { loadPlotly, ownTask, token } from "./plotly.js";

const RENEW_SECONDS = 60;

async function draw(element) {
  const columns = element.clientWidth < 480 ? 1 : element.clientWidth < 900 ? 2 : Number(element.dataset.mostColumns ?? 4);
  element.dataset.columns = String(columns);
  const answer = await fetch(`${element.dataset.figure}?columns=${columns}`).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const figure = await answer.json();
  if (!figure.data.length) {
    element.textContent = element.dataset.nothing ?? "Nothing has been recorded in this time yet: roll-ups are written each minute.";
    element.className = "soft";
    return;
  }
  element.figure = figure;
  await paint(element);
}

async function paint(element) {
  const Plotly = await loadPlotly();
  await ownTask();
  const { data, layout } = element.figure;
  const soft = token("--ink-soft");
  const axis = { gridcolor: token("--line-soft"), zeroline: false, linecolor: token("--line-soft"), tickfont: { size: 12, color: soft }, fixedrange: true };
  const themed = { ...layout, paper_bgcolor: "transparent", plot_bgcolor: "transparent", margin: { l: 48, r: 8, t: 24, b: 28 }, font: { family: token("--font"), size: 12, color: soft }, hovermode: "closest", autosize: true };
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) themed[name] = { ...axis, ...layout[name] };
  // As dates, Plotly shows them in the viewer's zone.
  for (const line of data) if (layout[(line.xaxis ?? "x").replace("x", "xaxis")]?.type === "date") line.x = line.x.map((at) => new Date(at));
  for (const line of data) line.line.color = token(`--series-${(line.meta.colour % 6) + 1}`);
  await Plotly.react(element, data, themed, { displayModeBar: false, responsive: true });
}

const elements = [...document.querySelectorAll("[data-figure]")];
elements.forEach(draw);
document.addEventListener("theme", () => elements.filter((element) => element.figure).forEach(paint));
for (const element of elements) setInterval(() => { if (document.visibilityState === "visible") draw(element); }, Number(element.dataset.figureSeconds ?? RENEW_SECONDS) * 1000);
window.addEventListener("pagehide", () => elements.forEach((element) => window.Plotly?.purge(element)));
