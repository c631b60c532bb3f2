// Tables that change under the reader: rows are renewed in place, new ones are announced, nothing jumps.
const ROW_MS = 1000;
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

export function setUpTables(link) {
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
