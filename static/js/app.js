// What every page does: the live link, its indicator, the theme, the search, tables and logs.
import { liveLink } from "./live.js";
import { setUpTheme } from "./theme.js";
import { setUpSearch } from "./search.js";
import { setUpTables } from "./tables.js";
import { setUpParts } from "./parts.js";
import { setUpLogs } from "./log.js";
import { setUpDrawer } from "./drawer.js";
import { ago } from "./format.js";

const CHANGED_MS = 2000;
const TICK_MS = 3000;

function setUpIndicator(link) {
  const indicator = document.querySelector("[data-live]");
  const banner = document.querySelector("[data-banner]");
  link.addEventListener("status", ({ detail }) => {
    indicator.dataset.level = detail.level;
    if (indicator.textContent !== detail.text) indicator.textContent = detail.text;
    indicator.title = detail.reason;
    const text = detail.lost ? `Reconnecting: ${detail.reason}. What you see may be old.` : detail.late ? `${detail.reason}. What you see is old.` : "";
    banner.hidden = !text;
    document.body.classList.toggle("is-stale", Boolean(text));
    if (banner.lastElementChild.textContent !== text) banner.lastElementChild.textContent = text;
  });
}

// Parts that the server renders again: after events, at most every two seconds; and by a slow tick.
function setUpPulses(link) {
  let due = 0;
  link.addEventListener("events", () => {
    if (due) return;
    due = setTimeout(() => { due = 0; window.htmx?.trigger(document.body, "live:changed"); }, CHANGED_MS * Math.random());
  });
  setInterval(() => {
    if (document.visibilityState === "visible") window.htmx?.trigger(document.body, "live:tick");
  }, TICK_MS);
}

// Times in the viewer's zone, and ages that grow.
function setUpMoments(link) {
  function renew() {
    const now = Date.now() / 1000 + link.clockOffset;
    for (const element of document.querySelectorAll("time[data-moment]")) {
      const at = new Date(element.dateTime);
      const text = ago(Math.max(0, now - at / 1000));
      if (element.textContent !== text) element.textContent = text;
      if (!element.dataset.local) {
        element.dataset.local = "yes";
        element.title = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
      }
    }
  }
  renew();
  setInterval(() => { if (document.visibilityState === "visible") renew(); }, 1000);
}

function setUpProblemCount(link) {
  const badge = document.querySelector("[data-problem-count]");
  link.addEventListener("summary", ({ detail }) => {
    const known = detail.problems ?? null;
    if (known === null || !badge) return;
    badge.textContent = String(known);
    badge.hidden = known === 0;
  });
}

// The sheet above the bottom bar of a phone: opened by its button, closed by Escape or a tap elsewhere.
function setUpMore() {
  const button = document.querySelector("[data-more]");
  const sheet = document.getElementById("more-pages");
  if (!button) return;
  function show(open) {
    sheet.classList.toggle("open", open);
    button.setAttribute("aria-expanded", String(open));
    if (open) sheet.querySelector("a")?.focus();
  }
  const isOpen = () => button.getAttribute("aria-expanded") === "true";
  button.addEventListener("click", () => show(!isOpen()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isOpen()) { show(false); button.focus(); }
  });
  document.addEventListener("click", (event) => {
    if (isOpen() && !sheet.contains(event.target) && !button.contains(event.target)) show(false);
  });
}

const COPIED_MS = 1500;

function setUpCopy() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
    } catch (error) {
      // Without TLS browsers have no clipboard for pages: show what to select instead.
      window.prompt("Copy it from here", button.dataset.copy);
      return;
    }
    const said = button.querySelector("[data-copy-said]");
    button.classList.add("done");
    said.textContent = "Copied";
    setTimeout(() => { button.classList.remove("done"); said.textContent = ""; }, COPIED_MS);
  });
}

// A field that may stay empty shows what it then is: the word that is chosen in another field.
function setUpEmptyFields() {
  for (const field of document.querySelectorAll("[data-empty-is]")) {
    const source = document.getElementById(field.dataset.emptyIs);
    if (!source) continue;
    const show = () => { field.placeholder = source.value ? source.selectedOptions[0].text : ""; };
    source.addEventListener("change", show);
    show();
  }
}

function setUpForms() {
  document.addEventListener("click", (event) => {
    const question = event.target.closest?.("[data-confirm]")?.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
    for (const open of document.querySelectorAll("details.menu[open], details.action[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });
  // A session that ended answers with the login page: show that, not a piece of it.
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.xhr.responseURL.includes("/login")) {
      event.preventDefault();
      window.location.reload();
    }
  });
  document.addEventListener("htmx:afterSwap", () => setUpLogs());
}

const link = liveLink();
setUpTheme();
setUpSearch();
setUpDrawer();
setUpForms();
setUpEmptyFields();
setUpMore();
setUpCopy();
setUpIndicator(link);
setUpPulses(link);
setUpTables(link);
setUpParts(link);
setUpMoments(link);
setUpProblemCount(link);
setUpLogs();
// Who may not see nodes and replicas is refused each time: that is no connection that comes back.
if (!document.querySelector("[data-live-refused]")) link.start();
