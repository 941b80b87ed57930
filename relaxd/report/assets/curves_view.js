// The curves of a run, beside those of others.
import { make, notify } from "./elements.js";

const REFRESH_MS = 4000;
const PATIENCE = 20; // a refresh waits for so many times the time that the last one took

export const title = "Curves";

export function create({ run, state, source }) {
  const page = make("div", { id: "charts" }), charts = new relaxdCharts.Charts(page);
  const smoothing = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", oninput: () => {
    charts.smoothing = Number(smoothing.value);
    smoothed.textContent = smoothing.value;
  } });
  const smoothed = make("output", {}, "0");
  const filter = make("input", { type: "search", placeholder: "Show charts with …", "aria-label": "show charts with", "data-search": "", oninput: () => { charts.filter = filter.value; } });
  const toggle = (text, set) => {
    const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      set(on);
    } }, text);
    return button;
  };
  const others = make("select", { "aria-label": "compare with a run", onchange: () => {
    if (!others.value) return;
    compared.push(others.value);
    others.value = "";
    load();
  } });
  const chosen = make("span", { class: "tools", style: { margin: "0" } });
  const element = make("div", {},
    make("div", { class: "tools stuck" }, filter, make("label", {}, "Smoothing ", smoothing, " ", smoothed),
      toggle("Log scale", (on) => { charts.log = on; }), toggle("By time", (on) => { charts.byTime = on; }),
      make("button", { type: "button", onclick: () => charts.showAll() }, "All steps"), others, chosen),
    make("p", { class: "note" }, "Drag to zoom, double-click to zoom out. Click a name to hide its line."), page);
  const compared = [];
  let known = new Map(), shownStep = -1, due = 0, timer = 0, loading = false, closed = false;

  source.get("/api/runs").then(({ runs }) => {
    others.hidden = !runs.length;
    others.replaceChildren(make("option", { value: "" }, "Compare with …"),
      ...runs.filter(({ run_id: id }) => id !== run).map(({ run_id: id }) => make("option", { value: id }, id)));
  }, () => {});

  async function load() {
    if (loading || closed) return;
    loading = true;
    const began = performance.now(), wanted = [run, ...compared];
    try {
      const data = await Promise.all(wanted.map((id) => (id !== run && known.get(id)) || source.ofRun(id, "charts")));
      if (closed) return;
      known = new Map(wanted.map((id, place) => [id, data[place]]));
      shownStep = state.metrics?.step ?? shownStep;
      charts.runs = wanted.map((id, place) => ({ name: id, data: data[place] }));
      chosen.replaceChildren(...compared.map((id) => make("button", { type: "button", "aria-label": `no longer compare with ${id}`, onclick: () => {
        compared.splice(compared.indexOf(id), 1);
        load();
      } }, `${id} ×`)));
    } catch (error) {
      notify(error.message, true);
    } finally {
      loading = false;
      due = performance.now() + Math.max(REFRESH_MS, PATIENCE * (performance.now() - began));
    }
    if (compared.length + 1 !== known.size) load(); // one was chosen meanwhile
  }

  function update(topic) {
    if (topic !== "metrics" || state.metrics.step === shownStep) return;
    clearTimeout(timer);
    timer = setTimeout(load, Math.max(0, due - performance.now()));
  }

  load();
  return { element, update, close() { closed = true; clearTimeout(timer); charts.close(); } };
}
