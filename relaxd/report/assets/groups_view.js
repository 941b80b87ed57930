// The ledger: what became of every group.
import { count, link, make, notify, number, table } from "./elements.js";

export const title = "Ledger";

const words = (name) => name.replaceAll("_", " ");

export function create({ run, state, source }) {
  const prompt = make("input", { type: "search", placeholder: "Prompt: a row or a group's id", "aria-label": "prompt", onchange: load });
  const where = make("input", { type: "search", placeholder: "reason = stale and tokens > 1000", "aria-label": "condition", "data-search": "", onchange: load, style: { minWidth: "320px" } });
  const sums = make("div", { class: "row two" }), found = make("section", { class: "card" });
  const element = make("div", {}, source.live ? make("div", { class: "tools" }, prompt, where, make("button", { type: "button", onclick: load }, "Look")) : null, sums, found);

  async function load() {
    try {
      const { groups, complete } = await source.ofRun(run, "groups", { prompt: prompt.value.trim(), where: where.value.trim() });
      found.replaceChildren(table([
        ["Group", ({ group_id: id, trace_id: trace }) => (source.traceUrl(trace) ? link(source.traceUrl(trace), id) : id)], ["Row", ({ row }) => (row === undefined ? "" : count(row)), "number"], ["Source", ({ source }) => source],
        ["Fate", ({ step, reason }) => (reason ? make("span", { class: "warn" }, `dropped: ${words(reason)}`) : `trained in step ${count(step)}`)],
        ["At", ({ stage }) => stage], ["Try", ({ retry, retried }) => `${retry + 1}${retried ? ", tried again" : ""}`],
        ["Tokens", ({ tokens }) => (tokens === undefined ? "" : number(tokens)), "number"], ["Reward", ({ reward }) => (reward === undefined ? "" : number(reward)), "number"],
      ], groups, "No closed group matches."), complete ? "" : make("p", { class: "note" }, "Only the newest million groups was looked at: relaxd ledger looks at all."));
    } catch (error) {
      notify(error.message, true);
    }
  }

  function update(topic) {
    if (topic !== "run" || !state.run?.groups) return;
    const { groups } = state.run, reasons = Object.entries(groups.dropped_by_reason).filter(([, times]) => times).sort((one, other) => other[1] - one[1]);
    const share = (part) => (groups.published ? `${((100 * part) / groups.published).toFixed(1)} %` : "");
    sums.replaceChildren(
      make("section", { class: "card" }, make("h2", {}, "Published groups"), table(
        [["", ([name]) => name], ["Groups", ([, value]) => count(value), "number"], ["Of all", ([, value]) => share(value), "number"]],
        [["published", groups.published], ["trained", groups.trained], ["open", groups.open], ["dropped", groups.dropped]])),
      make("section", { class: "card" }, make("h2", {}, "Why groups were dropped"), table(
        [["", ([name]) => (source.live ? make("button", { class: "quiet", type: "button", onclick: () => { where.value = `reason = ${name}`; load(); } }, words(name)) : words(name))],
          ["Groups", ([, value]) => count(value), "number"], ["Of all", ([, value]) => share(value), "number"]], reasons, "None was dropped.")));
  }

  load();
  setTimeout(() => update("run"));
  return { element, update, close() {} };
}
