// A form that is sent again by itself: the page shows how far something is that takes long.
for (const form of document.querySelectorAll("[data-again]")) {
  const timer = setTimeout(() => form.submit(), Number(form.dataset.again));
  form.addEventListener("submit", () => clearTimeout(timer));
}
