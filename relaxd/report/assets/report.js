// The report: the views of a run whose data is in this file. The console has the same views of runs that go on.
import * as answers from "./answers_view.js";
import * as config from "./config_view.js";
import * as curves from "./curves_view.js";
import { make, pill, press, viewKeys, viewLinks } from "./elements.js";
import * as groups from "./groups_view.js";
import * as results from "./results_view.js";
import * as samples from "./samples_view.js";

const VIEWS = { results, curves, samples, evaluations: answers, ledger: groups, configuration: config };

const page = (id) => document.getElementById(id);
let charts = null;

async function unpackCharts() {
  const packed = Uint8Array.from(atob(page("chart-data").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// What views ask the console's server for, from this file.
function sourceOf(known) {
  return {
    live: false,
    get: async () => ({ runs: [] }), // no others are here
    traceUrl: () => "",
    async ofRun(run, what, { step = 0 } = {}) {
      if (what === "charts") return charts ??= await unpackCharts();
      if (what !== "samples" || !step) return known[what];
      return { samples: known.samples.samples.filter((sample) => sample.step === step) };
    },
  };
}

function start() {
  const { run, answers: known } = JSON.parse(page("data").textContent), source = sourceOf(known);
  const state = { run, metrics: { step: run.step, values: {} } };
  let view = null;
  page("head").replaceChildren(make("h1", {}, run.run_id), pill(run.state), run.reason ? make("span", { class: "note" }, run.reason) : "");

  function show() {
    const [asked] = location.hash.slice(1).split("/"), name = asked in VIEWS ? asked : "results";
    view?.close();
    page("views").replaceChildren(...viewLinks(VIEWS, name, (one) => `#${one}`));
    view = VIEWS[name].create({ run: run.run_id, state, source });
    page("view").replaceChildren(view.element);
    for (const topic of Object.keys(state)) view.update(topic);
  }

  addEventListener("hashchange", show);
  addEventListener("keydown", (event) => press(event, viewKeys(VIEWS, (name) => { location.hash = name; }, view)));
  show();
}

start();
