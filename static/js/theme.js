// Light or dark: a cookie, so that the server paints the right one from the first pixel.
export function setUpTheme() {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.querySelector("[data-theme-switch]")?.addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    const secure = window.location.protocol === "https:" ? ";secure" : "";
    document.cookie = `theme=${root.dataset.theme};path=/;max-age=31536000;samesite=lax${secure}`;
    document.dispatchEvent(new CustomEvent("theme"));
  });
  dark.addEventListener("change", () => document.dispatchEvent(new CustomEvent("theme")));
}
