// The console: chooses run and view by the address, follows the run, and offers what an operator may do.
import { get, loadSession, ofRun, post, session, traceUrl } from "./api.js";
import * as logs from "./logs_view.js";
import * as replicas from "./replicas_view.js";
import * as overview from "./run_view.js";
import * as scaling from "./scaling_view.js";
import * as config from "./shared/config_view.js";
import * as curves from "./shared/curves_view.js";
import { ago, ask, count, duration, make, notify, pill, press, viewKeys, viewLinks } from "./shared/elements.js";
import * as groups from "./shared/groups_view.js";
import * as samples from "./shared/samples_view.js";

const VIEWS = { run: overview, curves, samples, ledger: groups, replicas, scaling, logs, configuration: config };
const TOPICS = ["connection", "run", "metrics", "health", "events", "fleet", "weights"];
const source = { live: true, get, ofRun, traceUrl }; // of the views that the report has, too
const RUNS_MS = 10000;
const ENDED = ["stopped", "failed"];

const page = (id) => document.getElementById(id);
let runs = [], shown = { run: "", view: "" }, state = {}, view = null, events = null;

// The address has the run and the view: #/RUN/VIEW. Without a run it is the newest.
function address() {
  const [, run = "", name = "run"] = location.hash.split("/").map(decodeURIComponent);
  return { run: run || runs[0]?.run_id || "", view: name in VIEWS ? name : "run" };
}

const link = (run, name) => `#/${encodeURIComponent(run)}/${name}`;

function route() {
  const next = address();
  if (next.run !== shown.run) follow(next.run);
  if (next.run !== shown.run || next.view !== shown.view || !view) show(next);
}

function show(next) {
  view?.close();
  shown = next;
  const { view: name, run } = next;
  page("views").replaceChildren(...viewLinks(VIEWS, name, (one) => link(run, one)));
  page("runs").value = run;
  document.title = run ? `${run} · ${VIEWS[name].title} · relaxd` : "relaxd";
  if (!run) {
    view = { element: make("div", { class: "empty" }, make("p", {}, "There is no run yet."), make("p", {}, make("code", {}, "relaxd run my.toml"), " starts one; it appears here.")), update() {}, close() {} };
  } else {
    view = VIEWS[name].create({ run, state, source });
  }
  page("view").replaceChildren(view.element);
  TOPICS.filter((topic) => topic in state).forEach((topic) => view.update(topic));
  showHead();
}

// Follow a run's events from now on.
function follow(run) {
  events?.close();
  state = {};
  events = null;
  if (!run) return;
  const source = events = new EventSource(`/api/runs/${encodeURIComponent(run)}/events`);
  for (const topic of TOPICS) {
    source.addEventListener(topic, ({ data }) => {
      if (source !== events) return;
      state[topic] = JSON.parse(data);
      view?.update(topic);
      if (topic === "run") showHead();
      if (topic === "connection") showAway();
    });
  }
  source.addEventListener("open", () => { if (source === events) showAway(); });
  source.addEventListener("error", () => {
    if (source !== events) return;
    showAway(source.readyState === EventSource.CLOSED ? "The console refuses to follow this run: load the page again." : "The console doesn't answer. Trying again …");
  });
}

// Say that what is shown is old.
function showAway(text = "") {
  const { away_since: since, reason } = state.connection ?? {};
  const away = page("away");
  const said = text || (since ? `The coordinator has not answered for ${duration(Date.now() / 1000 - since)}: what you see is from before. Trying again … (${reason})` : "");
  away.hidden = !said;
  away.textContent = said;
}

function showHead() {
  const run = state.run;
  if (!run) {
    page("head").replaceChildren(make("h1", {}, shown.run || "No run"));
    return;
  }
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0, ended = ENDED.includes(run.state);
  const left = run.remaining_seconds !== undefined && !ended ? `about ${duration(run.remaining_seconds)} left` : "";
  const when = ended && run.end_time ? `ended ${ago(run.end_time)}` : `began ${ago(run.create_time)}`;
  const focused = document.activeElement?.dataset?.action;
  page("head").replaceChildren(make("h1", {}, run.run_id), pill(run.state), make("div", { class: "actions" }, actions(run, ended)),
    make("div", { class: "meter" }, make("span", {}, `Step ${count(run.step)} of ${count(run.steps)}`),
      make("div", { class: "track", role: "progressbar", "aria-label": "steps", "aria-valuenow": run.step, "aria-valuemin": 0, "aria-valuemax": run.steps }, make("i", { style: { width: `${100 * share}%` } })),
      make("span", {}, [when, left].filter(Boolean).join(" · "))));
  if (focused) page("head").querySelector(`[data-action="${focused}"]`)?.focus();
}

function actions(run, ended) {
  const buttons = [];
  if (session.may_log_out) buttons.push(make("button", { type: "button", class: "quiet", onclick: () => post("/api/logout").then(() => location.reload()) }, "Log out"));
  if (!session.may_act || ended) return buttons;
  const button = (name, label, action, kind = "") => buttons.push(make("button", { type: "button", class: kind, "data-action": name, onclick: action }, label));
  const fields = { run_id: run.run_id };
  if (run.state === "paused") button("resume", "Resume", () => act("resume", fields, "The run goes on."), "main");
  else button("pause", "Pause", async () => {
    const reason = make("input", { type: "text", maxLength: 500 });
    const text = "Nothing more is published and no step ends until you resume it.";
    if (await ask("Pause the run?", text, [make("label", {}, "Reason", reason)], "Pause")) act("pause", { ...fields, reason: reason.value }, "The run is paused.");
  });
  button("checkpoint", "Checkpoint", () => {
    notify("Saving a checkpoint …");
    act("checkpoint", fields, ({ path }) => `Saved: ${path}`);
  });
  button("stop", "Stop", async () => {
    const reason = make("input", { type: "text", maxLength: 500 });
    if (await ask("Stop the run for good?", "Open groups are dropped, and the model is exported.", [make("label", {}, "Reason", reason)], "Stop the run", true)) act("stop", { ...fields, reason: reason.value }, "The run is stopping.");
  }, "danger");
  return buttons;
}

async function act(name, fields, done) {
  try {
    const answer = await post(`/api/actions/${name}`, fields);
    notify(typeof done === "function" ? done(answer) : done);
  } catch (error) {
    notify(error.message, true);
  }
}

async function loadRuns() {
  try {
    runs = (await get("/api/runs")).runs;
    const before = shown.run;
    page("runs").replaceChildren(...runs.map(({ run_id: id, state: phase }) => make("option", { value: id }, ENDED.includes(phase) ? id : `${id} · ${phase}`)));
    page("runs").value = before;
    if (session.may_act === null) await loadSession(); // the coordinator was away
    route();
  } catch (error) {
    if (error.status === 401) return location.reload();
    if (!shown.run) page("view").replaceChildren(make("p", { class: "empty" }, `${error.message} Trying again …`));
  }
  setTimeout(loadRuns, shown.run ? RUNS_MS : 2000);
}

function help() {
  const keys = [["1 – 8", "views"], ["[  ]", "newer, older run"], ["/", "search"], ["j  k", "next, previous sample"], ["?", "this help"], ["Esc", "close, leave a field"]];
  ask("Keys", "", [make("dl", { class: "keys" }, keys.map(([key, what]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, what)]))], "");
}

function pressed(event) {
  if (page("dialog").open) return;
  const place = runs.findIndex(({ run_id: id }) => id === shown.run);
  const open = (run) => { if (run) location.hash = link(run.run_id, shown.view); };
  const own = { "?": help, "[": () => open(runs[place - 1]), "]": () => open(runs[place + 1]) };
  press(event, { ...viewKeys(VIEWS, (name) => { location.hash = link(shown.run, name); }, view), ...own });
}

function showLogin() {
  document.querySelector(".side").hidden = true;
  document.querySelector(".frame").classList.add("alone");
  const token = make("input", { type: "password", autocomplete: "current-password", required: true, name: "token" });
  const problem = make("p", { class: "bad", role: "alert" });
  page("head").replaceChildren();
  page("view").replaceChildren(make("form", { class: "card login", onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: token.value });
      location.reload();
    } catch (error) {
      problem.textContent = error.message;
    }
  } }, make("h1", { style: { fontSize: "20px", margin: "0 0 6px" } }, "relaxd"),
  make("p", { class: "note" }, "This coordinator asks for a token. One for ", make("b", {}, "read"), " lets you look, one for ", make("b", {}, "admin"), " also lets you act."),
  make("label", {}, make("span", { class: "label" }, "Token"), token), problem,
  make("div", { style: { marginTop: "14px" } }, make("button", { type: "submit", class: "main" }, "Log in"))));
  token.style.width = "100%";
  token.focus();
}

async function start() {
  try {
    await loadSession();
  } catch (error) {
    page("view").replaceChildren(make("p", { class: "empty" }, `${error.message} Trying again …`));
    setTimeout(start, 2000);
    return;
  }
  page("place").textContent = session.coordinator;
  if (session.log_in) return showLogin();
  addEventListener("hashchange", route);
  addEventListener("keydown", pressed);
  page("help").addEventListener("click", help);
  page("runs").addEventListener("change", () => { location.hash = link(page("runs").value, shown.view || "run"); });
  setInterval(() => { if (state.connection?.away_since) showAway(); }, 1000);
  await loadRuns();
}

start();
