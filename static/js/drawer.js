// The drawer at the right: one replica, without leaving the page.
import { setUpLogs } from "./log.js";

let returnTo = null;

export async function openDrawer(url, opener) {
  const drawer = document.querySelector("[data-drawer]");
  const answer = await fetch(url, { headers: { "HX-Request": "true" } }).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  returnTo = opener || document.activeElement;
  drawer.innerHTML = await answer.text();
  drawer.hidden = false;
  window.htmx?.process(drawer);
  setUpLogs(drawer);
  drawer.querySelector("[data-drawer-close]").focus();
}

export function closeDrawer() {
  const drawer = document.querySelector("[data-drawer]");
  if (drawer.hidden) return;
  drawer.hidden = true;
  drawer.replaceChildren();
  setUpLogs();
  returnTo?.focus?.();
  document.dispatchEvent(new CustomEvent("drawer-closed"));
}

export function setUpDrawer() {
  document.addEventListener("click", (event) => { if (event.target.closest("[data-drawer-close]")) closeDrawer(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeDrawer(); });
}
