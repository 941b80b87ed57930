// Scaling: the autoscaler and its decisions, scale requests, and a form for one.
import { get, post, session } from "./api.js";
import { ask, card, clock, count, make, moment, notify, number, pill, table } from "./shared/elements.js";

const REFRESH_MS = 3000;
const MODES = [["off", "Off"], ["dry_run", "Say only"], ["on", "On"]];

export const title = "Scaling";

export function create({ state }) {
  const now = make("div", { class: "row two" }), requests = make("section"), decisions = make("section");
  const role = make("select", { "aria-label": "role" }), wanted = make("input", { type: "number", min: 1, max: 4096, value: 1, "aria-label": "replicas", style: { width: "90px" } });
  const form = make("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); scale(); } }, "Have", wanted, "replicas of", role, make("button", { type: "submit", class: "main" }, "Scale"));
  const element = make("div", {}, now, session.may_act ? card("Scale by hand", form) : null, make("div", { style: { height: "16px" } }), requests, make("div", { style: { height: "16px" } }), decisions);
  let timer = 0, closed = false;

  async function load() {
    try {
      const answer = await get("/api/scaling");
      if (!closed) show(answer);
    } catch {
      // The line above the view says that the coordinator is away.
    }
    if (!closed) timer = setTimeout(load, REFRESH_MS);
  }

  function show({ autoscaler, requests: list }) {
    if (now.contains(document.activeElement) || requests.contains(document.activeElement)) return;
    now.replaceChildren(autoscaler ? card("Autoscaler of rollout replicas",
      make("div", { class: "value" }, `${autoscaler.replicas} now, ${autoscaler.wanted_replicas} wanted`),
      make("p", { class: "note" }, autoscaler.reason || "Nothing has to change."), make("p", { class: "note" }, `Between ${autoscaler.min_replicas} and ${autoscaler.max_replicas}.`),
      make("div", { class: "tools", style: { margin: "0" }, role: "group", "aria-label": "mode" }, MODES.map(([mode, label]) => make("button", {
        type: "button", "aria-pressed": String(autoscaler.mode === mode), disabled: !session.may_act, onclick: () => setMode(mode),
      }, label)))) : card("Autoscaler of rollout replicas", make("p", { class: "note" }, "No run is active.")),
    card("Conditions", table([["", ({ direction }) => (direction === "out" ? "add" : "remove")], ["Value", ({ name }) => name], ["Now", ({ value }) => number(value), "number"],
      ["Must be", ({ above, threshold }) => `${above ? "above" : "below"} ${number(threshold)}`, "number"], ["", ({ holds }) => (holds ? pill("active") : "")]], autoscaler?.conditions ?? [], "None yet.")));
    requests.replaceChildren(card("Scale requests", table([
      ["When", ({ create_time: time }) => moment(time)], ["What", (one) => `${one.direction === "out" ? "Scale out" : "Scale in"} ${one.role}${one.replicas ? ` to ${one.replicas}` : ""}`],
      ["State", ({ state: phase }) => pill(phase)], ["Replicas", ({ scaled }) => count(scaled.length), "number"],
      ["Detail", ({ reason, scaled }) => reason || scaled.map(({ detail }) => detail).filter(Boolean).slice(0, 3).join("; ")],
      ["", ({ request_id: id, state: phase }) => (session.may_act && ["pending", "creating", "syncing", "draining"].includes(phase) ? make("button", { type: "button", class: "quiet", onclick: () => act("cancel-scaling", { request_id: id }, "cancelled") }, "Cancel") : "")],
    ], list, "There was none.")));
    decisions.replaceChildren(card("Decisions of the autoscaler", table([
      ["When", ({ decide_time: time }) => clock(time)], ["From", ({ replicas }) => count(replicas), "number"], ["To", ({ wanted_replicas: to }) => count(to), "number"], ["Why", ({ reason }) => reason],
    ], autoscaler?.decisions ?? [], "It has decided nothing yet.")));
  }

  async function act(name, fields, done) {
    try {
      await post(`/api/actions/${name}`, fields);
      notify(done);
      document.activeElement?.blur();
      clearTimeout(timer);
      load();
    } catch (error) {
      notify(error.message, true);
    }
  }

  const setMode = (mode) => act("autoscaler", { mode: `AUTOSCALE_MODE_${mode.toUpperCase()}` }, `The autoscaler is ${MODES.find(([name]) => name === mode)[1].toLowerCase()}.`);

  async function scale() {
    const count = Number(wanted.value), there = state.fleet?.role.filter((one) => one === role.value).length ?? 0;
    if (count === there) return notify(`There are ${there} replicas of ${role.value} already.`);
    const name = count > there ? "scale-out" : "scale-in";
    if (await ask(`${count > there ? "Add" : "Remove"} ${Math.abs(count - there)} of ${role.value}?`, `There are ${there} now, and will be ${count}.`, [], "Scale")) {
      await act(name, { role: role.value, replicas: count }, "The request is accepted.");
    }
  }

  function update(topic) {
    if (topic !== "fleet") return;
    const before = role.value, roles = [...new Set(state.fleet.role)].filter((name) => name !== "trainer" && name !== "critic");
    if (roles.join() === [...role.options].map(({ value }) => value).join()) return;
    role.replaceChildren(...roles.map((name) => make("option", { value: name }, name)));
    role.value = roles.includes(before) ? before : roles.includes("rollout") ? "rollout" : roles[0];
  }

  load();
  setTimeout(() => state.fleet && update("fleet"));
  return { element, update, close() { closed = true; clearTimeout(timer); } };
}
