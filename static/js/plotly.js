// Loads plotly.js from its wheel, once and only where a page draws.
let loading = null;

export function loadPlotly() {
  if (loading) return loading;
  // Plotly adds style elements, which the page's policy refuses with an error in the console. Elements
  // with these ids tell it that its rules are there already: app.css has the few that are needed.
  for (const id of ["plotly.js-style-global", "9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53"]) {
    const mark = document.createElement("meta");
    mark.id = id;
    mark.className = "no-inline-styles";
    document.head.append(mark);
  }
  loading = new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `${document.getElementById("app").dataset.static}vendor/plotly.min.js`;
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly.js did not load")));
    document.head.append(script);
  });
  return loading;
}

// Plotly's own start takes most of a second of a phone, and first plots some more: each gets a task of its
// own, so that taps and figures come in between.
let lastTask = Promise.resolve();

export function ownTask() {
  lastTask = lastTask.then(() => new Promise((resolve) => { setTimeout(resolve); }));
  return lastTask;
}

export function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
