// Parts of a page that follow what happens: after events the page is fetched once more, and each element
// with data-renew and an id becomes what it is there. What somebody is busy with is left alone until later.
const LEAST_MS = 2000;
// A page that takes the server long is fetched the more rarely: this times what the last fetch took.
const REST_FACTOR = 25;

export function isBusy(part) {
  const { anchorNode, isCollapsed } = window.getSelection();
  return part.contains(document.activeElement) || part.querySelector("details[open]") !== null
    || (!isCollapsed && part.contains(anchorNode));
}

function renewParts(parts, fresh) {
  for (const part of parts) {
    const now = fresh.getElementById(part.id);
    if (!now || isBusy(part)) continue;
    part.replaceWith(document.adoptNode(now));
    window.htmx?.process(now);
  }
}

export function setUpParts(link) {
  let due = 0;
  let restMs = LEAST_MS;
  let isOwed = false;

  async function renew() {
    due = 0;
    if (document.visibilityState !== "visible") { isOwed = true; return; }
    const parts = [...document.querySelectorAll("[data-renew]")];
    const began = performance.now();
    const answer = await fetch(window.location.href).catch(() => null);
    if (!answer?.ok || answer.redirected) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    restMs = Math.max(LEAST_MS, REST_FACTOR * (performance.now() - began));
    renewParts(parts.filter((part) => part.isConnected), fresh);
    document.dispatchEvent(new CustomEvent("renewed"));
  }

  function ask() {
    isOwed = false;
    if (!due && document.querySelector("[data-renew]")) due = setTimeout(renew, restMs * (0.5 + Math.random() / 2));
  }

  link.addEventListener("events", ask);
  document.addEventListener("visibilitychange", () => { if (isOwed && document.visibilityState === "visible") ask(); });
}
