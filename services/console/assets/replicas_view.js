// Health and replicas: each process, what it does, and the weights and GPUs that it has.
import { get, post, session } from "./api.js";
import { ask, bytes, card, clock, count, duration, make, notify, pill, table } from "./shared/elements.js";

const REFRESH_MS = 3000;
const SHOWN = 200;

export const title = "Replicas";

export function create({ state }) {
  const search = make("input", { type: "search", placeholder: "Filter by name, role, state …", "aria-label": "filter", "data-search": "", oninput: show });
  const total = make("span"), list = make("section", { class: "card" }), health = make("div", { class: "row two" });
  const element = make("div", {}, health, make("div", { class: "tools" }, search, total), list);
  let replicas = [], timer = 0, closed = false;

  async function load() {
    try {
      replicas = (await get("/api/replicas")).replicas;
      if (!closed) show();
    } catch {
      // The line above the view says that the coordinator is away.
    }
    if (!closed) timer = setTimeout(load, REFRESH_MS);
  }

  const healthOf = ({ registration: { role, instance, replica_id: id } }) => state.health?.find((one) => one.role === role && one.instance === (instance || id));

  function show() {
    if (list.contains(document.activeElement)) return; // a button in it is about to be pressed
    const words = search.value.toLowerCase().split(/\s+/);
    const found = replicas.filter(({ registration, status }) => {
      const text = `${registration.replica_id} ${registration.role} ${registration.instance} ${registration.address} ${status.state} ${status.detail}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    total.textContent = `${count(found.length)} of ${count(replicas.length)} replicas${found.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}`;
    list.replaceChildren(table([
      ["Replica", ({ registration, status }) => [make("b", {}, registration.replica_id), make("div", { class: "note" }, [registration.address, status.uptime_seconds ? `up ${duration(status.uptime_seconds)}` : ""].filter(Boolean).join(", "))], "short"],
      ["Health", (one) => { const known = healthOf(one); return known ? [pill(known.state), known.restarts ? make("div", { class: "note" }, `${known.restarts} restarts`) : null] : ""; }, "short"],
      ["State", ({ status, heartbeat_age_seconds: age }) => [pill(status.state), age > 3 ? make("div", { class: "warn" }, `silent for ${duration(age)}`) : null], "short"],
      ["Doing", ({ status }) => status.detail],
      ["Holds", ({ status }) => count(status.held_groups), "number"], ["Done", ({ status }) => count(status.done_groups), "number"],
      ["Weights", ({ status }) => (status.weights ? `v${status.weights.version}` : ""), "number"],
      ["GPUs", ({ leased_gpu_uuids: gpus, leased_gpu_share: share }) => (gpus.length ? make("span", { title: gpus.join("\n") }, `${gpus.length}${share && share < 1 ? ` × ${share}` : ""}`) : ""), "number"],
      ["Memory", ({ status }) => (status.gauges.rss_bytes ? bytes(status.gauges.rss_bytes) : ""), "number"],
      ["", ({ registration, status }) => (session.may_act && status.state !== "draining" ? make("button", { type: "button", class: "quiet", onclick: () => drain(registration.replica_id) }, "Drain") : "")],
    ], found.slice(0, SHOWN), "No replica matches."));
  }

  async function drain(id) {
    const text = "It takes no more work, and finishes or hands back what it holds.";
    if (!(await ask(`Drain ${id}?`, text, [], "Drain", true))) return;
    try {
      const { held_groups: held } = await post("/api/actions/drain", { replica_id: id });
      notify(held ? `${id} still holds ${held} groups` : `${id} is drained`);
    } catch (error) {
      notify(error.message, true);
    }
  }

  function update(topic) {
    if (topic !== "health" && topic !== "events" && topic !== "fleet") return;
    health.replaceChildren(
      card("Roles", table([
        ["Role", ({ role }) => role], ["Replicas", (one) => count(one.replicas), "number"], ["Ready", (one) => count(one.ready), "number"],
        ["Hold", (one) => count(one.held), "number"], ["Done", (one) => count(one.done), "number"], ["GPUs", (one) => count(one.gpus), "number"],
        ["", ({ trouble }) => (trouble ? [pill(trouble.state), make("div", { class: "note" }, trouble.reason)] : "")],
      ], roles(), "No replica is there.")),
      card("What happened", table([["When", ({ create_time: time }) => clock(time)], ["Who", ({ instance, role }) => instance || role], ["What", ({ text }) => text]], [...(state.events ?? [])].reverse().slice(0, 12), "Nothing since the console looks.")));
  }

  // The replicas' numbers by role, and what is wrong with the role as a whole.
  function roles() {
    const found = new Map(), now = state.fleet;
    now?.role.forEach((role, place) => {
      const one = found.get(role) ?? { role, replicas: 0, ready: 0, held: 0, done: 0, gpus: 0 };
      one.replicas += 1;
      one.ready += now.state[place] === "ready";
      for (const name of ["held", "done", "gpus"]) one[name] += now[name][place];
      one.trouble = state.health?.find((health) => health.role === role && !health.instance && health.state !== "healthy");
      found.set(role, one);
    });
    return [...found.values()];
  }

  load();
  setTimeout(() => update("health"));
  return { element, update, close() { closed = true; clearTimeout(timer); } };
}
