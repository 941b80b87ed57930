// The configuration of a run, and its difference to another one's; its folder and logs.
import { card, make, moment, notify, table } from "./elements.js";

export const title = "Configuration";

// Settings by their dotted names.
function flat(value, name = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, inner] of Object.entries(value)) flat(inner, name ? `${name}.${key}` : key, found);
  } else {
    found.set(name, JSON.stringify(value));
  }
  return found;
}

export function create({ run, state, source }) {
  const search = make("input", { type: "search", placeholder: "Filter settings …", "aria-label": "filter", "data-search": "", oninput: show });
  const other = make("select", { "aria-label": "compare with a run", onchange: compare });
  const list = make("section", { class: "card" }), facts = make("div"), texts = make("div");
  const element = make("div", {}, facts, texts, make("div", { class: "tools" }, search, other), list);
  let own = new Map(), others = null;

  source.get("/api/runs").then(({ runs }) => {
    other.hidden = !runs.length;
    other.replaceChildren(make("option", { value: "" }, "All settings"),
      ...runs.filter(({ run_id: id }) => id !== run).map(({ run_id: id }) => make("option", { value: id }, `Difference to ${id}`)));
  }, () => {});
  source.ofRun(run, "config").then(({ config, changes_toml: changes, config_toml: whole }) => {
    own = flat(config);
    texts.replaceChildren(...[["Settings that differ from the defaults", changes], ["The configuration as it was given", whole]].filter(([, text]) => text)
      .map(([name, text]) => make("details", {}, make("summary", {}, name), make("pre", {}, text))));
    show();
    update("run");
  }, (error) => notify(error.message, true));

  async function compare() {
    try {
      others = other.value ? flat((await source.ofRun(other.value, "config")).config) : null;
      show();
    } catch (error) {
      notify(error.message, true);
    }
  }

  function show() {
    const word = search.value.toLowerCase(), names = [...new Set([...own.keys(), ...(others?.keys() ?? [])])].sort();
    const rows = names.filter((name) => name.toLowerCase().includes(word) && (!others || own.get(name) !== others.get(name)));
    const setting = ["Setting", (name) => name], value = [others ? run : "Value", (name) => own.get(name) ?? "(absent)"];
    list.replaceChildren(table(others ? [setting, value, [other.value, (name) => others.get(name) ?? "(absent)"]] : [setting, value], rows, others ? "The two runs have equal settings." : "No setting matches."));
  }

  function update(topic) {
    if (topic !== "run" || !state.run) return;
    const { folder, create_time: begun, end_time: ended } = state.run;
    facts.replaceChildren(make("div", { class: "row" }, card("Where it is", make("dl", { class: "facts-list" },
      [begun ? ["Begun", moment(begun)] : null, ended ? ["Ended", moment(ended)] : null, ["Folder", folder], ["Logs", make("code", {}, `relaxd logs --run ${run}`)], ["Report", make("code", {}, `relaxd report ${run}`)], own.get("telemetry.traces") === '"file"' ? ["Traces", make("code", {}, `${folder}/traces`)] : null]
        .filter(Boolean).map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])))));
  }

  setTimeout(() => update("run"));
  return { element, update, close() {} };
}
