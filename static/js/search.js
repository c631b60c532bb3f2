// The search field: "/" focuses it, results appear below while typing, arrow keys walk through them.
const PAUSE_MS = 200;

export function setUpSearch() {
  const form = document.querySelector("[data-search]");
  if (!form) return;
  const input = form.querySelector("input");
  const results = form.querySelector("[data-search-results]");
  let timer = 0;
  let asked = 0;

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      input.focus();
      input.select();
    }
  });

  async function ask() {
    const text = input.value.trim();
    asked += 1;
    const mine = asked;
    if (!text) return results.replaceChildren();
    const answer = await fetch(`${form.action}?q=${encodeURIComponent(text)}`, { headers: { "HX-Request": "true" } }).catch(() => null);
    if (mine !== asked || !answer?.ok || answer.redirected) return undefined;
    results.innerHTML = await answer.text();
    return undefined;
  }

  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, PAUSE_MS); });
  form.addEventListener("keydown", (event) => {
    const links = [input, ...results.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      links[(at + (event.key === "ArrowDown" ? 1 : links.length - 1)) % links.length]?.focus();
    } else if (event.key === "Escape") {
      results.replaceChildren();
      input.focus();
    }
  });
  document.addEventListener("pointerdown", (event) => { if (!form.contains(event.target)) results.replaceChildren(); });
}
