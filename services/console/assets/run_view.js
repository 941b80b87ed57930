// The run as one picture: its groups on their way through the stages, what it waits for, its engines and their weights.
import { ofRun } from "./api.js";
import { card, clock, count, duration, figure, make, number, pill, short } from "./shared/elements.js";

const BLOCKS = 48;
const SPARKS = [
  ["reward_mean", "Reward"], ["response_length_mean", "Response length"], ["tokens_per_second", "Tokens per second"],
  ["step_seconds", "Seconds a step"], ["staleness_mean", "Staleness"], ["entropy", "Entropy"],
  ["grad_norm", "Gradient norm"], ["logprob_difference", "Log-prob gap"],
];
const SPARK_POINTS = 1000;
const MANY = 120; // engines, whose squares are smaller
// Stages by the column in which the picture has them; those of a column work at the same time.
const PLACES = { rollout: 1, reward: 2, reference: 2, teacher: 2, critic: 2, advantage: 3, train: 4 };
const TITLES = {
  rollout: "Generate", reward: "Score", reference: "Reference", teacher: "Teacher", critic: "Critic",
  advantage: "Advantages", train: "Train",
};
const WORKERS = { rollout: ["rollout", "agent"], train: ["trainer"] };
const SHARE_COLOURS = ["#2563eb", "#f28e2b", "#2ca02c", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#7f7f7f"];

export const title = "Run";

export function create({ run, state }) {
  const says = make("div"), flow = make("div", { class: "flow" }), facts = make("div", { class: "row four" });
  const fleet = make("div", { class: "row two" }), sparks = make("div", { class: "row four" }), news = make("div", { class: "row two" });
  const element = make("div", {}, says, flow, facts, fleet, sparks, news);
  const plots = new Map();
  const points = new Map(SPARKS.map(([name]) => [name, [[], []]]));
  let trained = null, settings = null, timer = 0;

  ofRun(run, "config").then(({ config }) => { settings = config; update("run"); }, () => {});
  ofRun(run, "series", SPARKS.map(([name]) => ["name", name])).then((series) => {
    for (const [name, { steps, values }] of Object.entries(series)) points.set(name, [steps, values]);
    addPoint();
    drawSparks();
  }, () => {});

  function addPoint() {
    const now = state.metrics;
    if (!now) return;
    for (const [name, [steps, values]] of points) {
      if (now.values[name] === undefined || steps.at(-1) >= now.step) continue;
      steps.push(now.step);
      values.push(now.values[name]);
      if (steps.length > SPARK_POINTS) { // every other one of the older half
        const keep = (_, place) => place % 2 === 0 || place > SPARK_POINTS / 2;
        points.set(name, [steps.filter(keep), values.filter(keep)]);
      }
    }
  }

  function drawSparks() {
    const accent = getComputedStyle(document.body).getPropertyValue("--accent").trim();
    for (const [name, label] of SPARKS) {
      const [steps, values] = points.get(name);
      if (!values.length) continue;
      let plot = plots.get(name);
      if (!plot) {
        const place = make("div", { class: "spark" }), value = make("div", { class: "value" });
        sparks.append(card(label, value, place));
        const options = {
          width: place.clientWidth, height: 74, padding: [4, 2, 4, 2], legend: { show: false }, cursor: { show: false },
          scales: { x: { time: false } }, axes: [{ show: false }, { show: false }],
          series: [{}, { stroke: accent, width: 1.6, fill: `${accent}14`, points: { show: (chart) => chart.data[0].length < 2 } }],
        };
        plot = { chart: new uPlot(options, [steps, values], place), value, place };
        plots.set(name, plot);
        resized.observe(place);
      }
      plot.chart.setData([steps, values]);
      plot.value.textContent = number(values.at(-1));
    }
  }

  const resized = new ResizeObserver(() => {
    for (const { chart, place } of plots.values()) chart.setSize({ width: place.clientWidth, height: 74 });
  });

  function showSays() {
    const { waiting_for: waits, wait, alarms, reason, state: phase } = state.run;
    const parts = alarms.map((alarm) => make("div", { class: "says alarm" }, alarm.text));
    if (waits) {
      const advice = wait?.advice ?? [];
      parts.push(make("div", { class: "says", role: "status" }, waits, advice.length ? make("ul", {}, advice.map((line) => make("li", {}, line))) : null));
    } else if (phase === "running") {
      parts.push(make("div", { class: "says calm" }, "Steps end as usual: nothing holds the run up."));
    } else if (reason) {
      parts.push(make("div", { class: "says" }, reason));
    }
    says.replaceChildren(...parts);
  }

  // Squares for groups: those that somebody works on, then those that wait; each stands for several if there are many.
  function blocks(held, waiting, each) {
    const full = Math.ceil(held / each), empty = Math.ceil(waiting / each);
    return make("div", { class: "blocks", "aria-hidden": "true" },
      Array.from({ length: full }, () => make("i", { class: "held" })), Array.from({ length: empty }, () => make("i")));
  }

  function ofRoles(roles) {
    const found = { replicas: 0, done: 0 };
    state.fleet?.role.forEach((role, place) => {
      if (!roles.includes(role)) return;
      found.replicas += 1;
      found.done += state.fleet.done[place];
    });
    return found;
  }

  function stage(queue, each) {
    const waited = state.run.wait, workers = ofRoles(WORKERS[queue.stage] ?? [queue.stage]);
    const name = waited?.current_on ?? "", roles = WORKERS[queue.stage] ?? [queue.stage];
    const holds = state.run.waiting_for && roles.some((role) => name === role || name.startsWith(`${role}-`));
    return make("section", { class: `card stage${holds ? " waited" : ""}`, "data-stage": queue.stage },
      make("h2", {}, TITLES[queue.stage] ?? queue.stage, make("small", {}, `×${workers.replicas}`)),
      blocks(queue.held, queue.waiting, each),
      make("div", { class: "counts" },
        make("b", {}, short(queue.held)), "working", make("b", {}, short(queue.waiting)), "waiting",
        make("b", {}, short(queue.stage === "train" ? state.run.groups.trained : workers.done)), "done"));
  }

  function showFlow() {
    const { queues, groups, step } = state.run;
    const largest = Math.max(1, ...queues.map(({ held, waiting }) => held + waiting)), each = Math.ceil(largest / BLOCKS);
    const columns = [[prompts(groups, each)], [], [], [], []];
    for (const queue of queues) (columns[PLACES[queue.stage] ?? 2]).push(stage(queue, each));
    columns.push([end(groups, step)]);
    const moves = trained !== null && groups.trained > trained;
    trained = groups.trained;
    const shown = columns.filter((column) => column.length);
    flow.replaceChildren(...shown.flatMap((column, place) => [
      ...(place ? [make("div", { class: `arrow${moves ? " moves" : ""}`, "aria-hidden": "true" }, make("i"))] : []),
      make("div", { class: "column" }, column),
    ]));
  }

  function prompts(groups, each) {
    return make("section", { class: "card stage" }, make("h2", {}, "Prompts"),
      make("div", { class: "counts" }, make("b", {}, short(groups.published)), "published", make("b", {}, short(groups.open)), "open"),
      make("div", { class: "note" }, each > 1 ? `a square is ${each} groups` : "a square is a group"));
  }

  function end(groups, step) {
    const wanted = settings?.trainer?.groups_per_step;
    const queue = state.run.queues.find(({ stage: name }) => name === "train");
    const ready = queue ? queue.held + queue.waiting : 0;
    return make("section", { class: "card stage" }, make("h2", {}, "Weights", make("small", {}, `v${count(step)}`)),
      make("div", { class: "counts" }, make("b", {}, short(groups.trained)), "trained", make("b", {}, short(groups.dropped)), "dropped"),
      wanted ? make("div", { class: "note" }, `step ${step + 1} has ${Math.min(ready, wanted)} of ${wanted} groups`) : null);
  }

  function showFacts() {
    const { run: now, weights, metrics } = state, values = metrics?.values ?? {};
    const behind = weights?.announced && now.oldest_engine_version !== undefined ? weights.announced.version - now.oldest_engine_version : null;
    facts.replaceChildren(
      figure("Staleness of a step", number(values.staleness_mean), values.staleness_max === undefined ? "" : `${number(values.staleness_max)} at most`),
      figure("Versions behind the newest", behind === null ? "–" : count(behind), now.oldest_engine_version === undefined ? "no weights yet" : `the oldest serves ${count(now.oldest_engine_version)}`),
      figure("Last weight synchronisation", weights?.last_sync_seconds ? duration(weights.last_sync_seconds) : "–", weights?.announced ? `version ${count(weights.announced.version)}` : "none yet"),
      figure("Dropped groups", now.groups.published ? `${((100 * now.groups.dropped) / now.groups.published).toFixed(1)} %` : "–", dropped(now.groups)),
    );
  }

  function dropped({ dropped_by_reason: reasons }) {
    const sorted = Object.entries(reasons).filter(([, number]) => number).sort((one, other) => other[1] - one[1]);
    return sorted.slice(0, 3).map(([reason, times]) => `${short(times)} ${reason.replaceAll("_", " ")}`).join(", ") || "none";
  }

  function showFleet() {
    const now = state.fleet;
    if (!now) return;
    const newest = state.weights?.announced?.version ?? Math.max(0, ...now.version.filter((version) => version !== null));
    const engines = now.id.flatMap((id, place) => {
      if (now.role[place] !== "rollout") return [];
      const version = now.version[place], phase = now.state[place];
      const lag = version === null ? null : newest - version;
      const kind = phase === "failed" || phase === "quarantined" ? "bad" : lag === null ? "starting" : `v${Math.min(2, Math.max(0, lag))}`;
      const what = `${id}: ${phase}, ${version === null ? "no weights yet" : `version ${version}`}, holds ${now.held[place]} groups`;
      return [make("i", { class: kind, title: now.silent[place] ? `${what}, silent for ${now.silent[place]} s` : what })];
    });
    const key = (kind, label) => [make("span", { class: "engines" }, make("i", { class: kind })), label];
    fleet.replaceChildren(
      card(`Engines and their weights (${engines.length})`,
        engines.length ? make("div", { class: `engines${engines.length > MANY ? " many" : ""}`, role: "img", "aria-label": `${engines.length} engines` }, engines) : make("p", { class: "note" }, "No engine is there."),
        make("div", { class: "legend" }, key("v0", "newest"), key("v1", "one behind"), key("v2", "older"), key("starting", "none yet"), key("bad", "failed"))),
      gpus(now));
  }

  function gpus(now) {
    const held = new Map();
    now.role.forEach((role, place) => held.set(role, (held.get(role) ?? 0) + now.gpus[place]));
    const roles = [...held].filter(([, gpu]) => gpu), total = roles.reduce((sum, [, gpu]) => sum + gpu, 0);
    const colour = (place) => SHARE_COLOURS[place % SHARE_COLOURS.length];
    return card(`Leased GPUs (${count(total)})`,
      total ? make("div", { class: "shares", role: "img", "aria-label": roles.map(([role, gpu]) => `${role} ${gpu}`).join(", ") },
        roles.map(([, gpu], place) => make("i", { style: { flexGrow: String(gpu), background: colour(place) } }))) : make("p", { class: "note" }, "This run leases no GPUs."),
      make("div", { class: "legend" }, roles.map(([role, gpu], place) => [make("span", { class: "engines" }, make("i", { style: { background: colour(place) } })), `${role} ${count(gpu)}`])));
  }

  function showNews() {
    const events = (state.events ?? []).slice(-8).reverse();
    const troubled = (state.health ?? []).filter(({ state: phase }) => phase !== "healthy").slice(0, 8);
    news.replaceChildren(
      card("Lately", events.length ? make("div", {}, events.map((event) => make("div", { class: "sub" },
        `${clock(event.create_time)}  ${event.instance || event.role}: ${event.text}`))) : make("p", { class: "note" }, "Nothing has happened to the health of the run since the console looks.")),
      card("Not healthy", troubled.length ? make("div", {}, troubled.map((one) => make("div", { class: "sub" }, pill(one.state), ` ${one.instance || one.role} ${one.reason}`))) : make("p", { class: "note" }, "Every role and replica is healthy.")));
  }

  function update(topic) {
    if (!state.run) return;
    if (topic === "run" || topic === "fleet") { showSays(); showFlow(); }
    if (topic === "run" || topic === "metrics" || topic === "weights") showFacts();
    if (topic === "fleet" || topic === "weights") showFleet();
    if (topic === "metrics") { addPoint(); drawSparks(); }
    if (topic === "events" || topic === "health") showNews();
  }

  const all = () => ["run", "fleet", "metrics", "events"].forEach(update);
  timer = setTimeout(all);
  return {
    element,
    update,
    close() {
      clearTimeout(timer);
      resized.disconnect();
      for (const { chart } of plots.values()) chart.destroy();
    },
  };
}
