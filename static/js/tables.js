// Tables that change under the reader: rows are renewed in place, new ones are announced, nothing jumps.
const ROW_MS = 1000;
const LOADS_MS = 5000;
const NO_DATA = "no data";
const MISSING = "–";
const dueRows = new Map();

function renewRow(row) {
  if (dueRows.has(row.id)) return;
  dueRows.set(row.id, setTimeout(async () => {
    dueRows.delete(row.id);
    const answer = await fetch(row.dataset.rowUrl, { headers: { "HX-Request": "true" } }).catch(() => null);
    const now = document.getElementById(row.id);
    if (!answer?.ok || answer.redirected || !now) return;
    const holder = document.createElement("tbody");
    holder.innerHTML = await answer.text();
    const fresh = holder.querySelector("tr");
    if (!fresh || now.contains(document.activeElement)) return;
    fresh.classList.add("fresh");
    now.replaceWith(fresh);
  }, ROW_MS * Math.random()));
}

function announce(kind, count) {
  const notice = document.querySelector(`[data-news="${kind}"]`);
  if (!notice || !count) return;
  const total = Number(notice.dataset.count || 0) + count;
  notice.dataset.count = String(total);
  notice.textContent = `${total} new · show`;
  notice.hidden = false;
}

// The loads in a table of replicas: only texts change, so nothing moves under the reader.
async function renewLoads(body) {
  const rows = [...body.querySelectorAll("tr[data-subject]")];
  if (!rows.length) return;
  const ids = rows.map((row) => row.dataset.subject).join(",");
  const answer = await fetch(`${body.dataset.loadsUrl}?ids=${ids}`).catch(() => null);
  const known = answer?.ok && !answer.redirected ? await answer.json() : {};
  for (const row of rows) {
    for (const cell of row.querySelectorAll("[data-load]")) {
      const said = known[row.dataset.subject]?.[cell.dataset.load] ?? MISSING;
      const text = said === MISSING ? NO_DATA : said;
      if (cell.textContent !== text) cell.textContent = text;
      cell.classList.toggle("missing", text === NO_DATA);
    }
  }
}

export function setUpTables(link) {
  setInterval(() => {
    if (document.visibilityState === "visible") document.querySelectorAll("[data-loads-url]").forEach(renewLoads);
  }, LOADS_MS);
  link.addEventListener("events", ({ detail: events }) => {
    const news = new Map();
    for (const event of events) {
      const row = document.querySelector(`[data-live-rows] [data-subject="${CSS.escape(event.subject)}"]`);
      if (row) renewRow(row);
      else if (event.event === "created" || event.event === "enrolled") news.set(event.kind, (news.get(event.kind) || 0) + 1);
    }
    news.forEach((count, kind) => announce(kind, count));
    announce("event", events.length);
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-news]")) window.location.reload();
  });
}
