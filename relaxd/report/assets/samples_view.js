// What the model wrote: samples to search and sort, and one of them in full, its tokens coloured by a number.
import { count, link, make, notify, number, table } from "./elements.js";

const NEWEST = 200;
const SHOWN = 300;
const KEPT_TOKENS = 500; // samples
const SORTS = {
  newest: ["Newest first", (one, other) => other.step - one.step],
  best: ["Highest reward", (one, other) => other.reward - one.reward],
  worst: ["Lowest reward", (one, other) => one.reward - other.reward],
  longest: ["Longest", (one, other) => other.length - one.length],
  advantage: ["Largest advantage", (one, other) => Math.abs(other.advantage) - Math.abs(one.advantage)],
  oldest: ["Oldest weights", (one, other) => one.version - other.version],
};
// Colourings of tokens: title, the values of a sample, and whether they diverge from zero or rise from it.
const COLOURS = {
  none: ["No colour", () => null],
  gap: ["Log-prob gap", ({ trainer_logprobs: trainer, engine_logprobs: engine }) => trainer.map((value, place) => value - engine[place]), "diverging"],
  surprise: ["Surprise (−log-prob)", ({ engine_logprobs: engine }) => engine.map((value) => -value), "rising"],
  advantage: ["Advantage", ({ advantages }) => advantages, "diverging"],
  version: ["Age of the weights", ({ versions }, step) => versions.map((version) => step - 1 - version), "rising"],
};

export const title = "Samples";

export function create({ run, state, source }) {
  const search = make("input", { type: "search", placeholder: "Search prompts and answers …", "aria-label": "search", "data-search": "", oninput: showList });
  const sort = make("select", { "aria-label": "sort", onchange: showList }, Object.entries(SORTS).map(([name, [label]]) => make("option", { value: name }, label)));
  const finish = make("select", { "aria-label": "how it ended", onchange: showList });
  const reward = make("select", { "aria-label": "reward", onchange: showList },
    [["", "Any reward"], ["positive", "Advantage above 0"], ["negative", "Advantage below 0"], ["zero", "Reward 0 or less"]].map(([value, label]) => make("option", { value }, label)));
  const step = make("input", { type: "number", min: 0, placeholder: "Step", "aria-label": "step", style: { width: "90px" }, onchange: load });
  const colour = make("select", { "aria-label": "colour of the tokens", onchange: () => { wanted = colour.value; showOne(); } });
  const fresh = make("button", { type: "button", hidden: true, onclick: load }, "Show new samples");
  const list = make("div", { class: "card list", role: "listbox", "aria-label": "samples" }), one = make("article", { class: "card", "aria-live": "polite" });
  const total = make("span");
  const element = make("div", {}, make("div", { class: "tools" }, search, sort, finish, reward, step, fresh, total), make("div", { class: "samples" }, list, one));
  let samples = [], shown = [], chosen = null, loadedStep = 0, wanted = "gap";
  const tokensOf = new Map(); // of the samples of the steps that were looked at, by group and place

  async function load() {
    try {
      const answer = await source.ofRun(run, "samples", { limit: NEWEST, step: Number(step.value) || 0 });
      samples = answer.samples;
      const same = chosen && samples.find((sample) => key(sample) === key(chosen)); // what is being read stays
      loadedStep = Math.max(state.metrics?.step ?? 0, ...samples.map(({ step: own }) => own));
      fresh.hidden = true;
      const reasons = [...new Set(samples.map(({ finish_reason: reason }) => reason))].sort();
      const before = finish.value;
      finish.replaceChildren(make("option", { value: "" }, "Any end"), ...reasons.map((reason) => make("option", { value: reason }, reason)));
      finish.value = reasons.includes(before) ? before : "";
      if (same) choose(same);
      showList();
    } catch (error) {
      notify(error.message, true);
    }
  }

  function passes(sample) {
    const word = search.value.toLowerCase();
    if (finish.value && sample.finish_reason !== finish.value) return false;
    if (reward.value === "positive" && !(sample.advantage > 0)) return false;
    if (reward.value === "negative" && !(sample.advantage < 0)) return false;
    if (reward.value === "zero" && sample.reward > 0) return false;
    return !word || texts(sample).some((text) => text.toLowerCase().includes(word));
  }

  const texts = (sample) => [sample.prompt, sample.response, sample.answer, sample.group_id, ...sample.conversation.map(({ content }) => content)];

  function showList() {
    shown = samples.filter(passes).sort(SORTS[sort.value][1]);
    total.textContent = `${count(shown.length)} of ${count(samples.length)} samples`;
    list.replaceChildren(...shown.slice(0, SHOWN).map((sample) => make("button", {
      type: "button", role: "option", "aria-selected": String(sample === chosen), onclick: () => choose(sample),
    }, make("span", { class: "text" }, sample.response.trim() || sample.conversation.at(-1)?.content || "(nothing)"),
    make("span", { class: "facts" }, make("span", {}, `step ${sample.step}`), make("b", {}, number(sample.reward)),
      make("span", { class: sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "" }, `${sample.advantage > 0 ? "+" : ""}${number(sample.advantage)}`),
      make("span", {}, `${count(sample.length)} tokens`), sample.finish_reason === "stop" ? null : make("span", { class: "warn" }, sample.finish_reason)))));
    if (!shown.length) list.append(make("p", { class: "empty" }, samples.length ? "No sample matches." : "No sample yet: the run keeps some of each step (telemetry.samples_per_step)."));
    if (!shown.includes(chosen)) choose(shown[0] ?? null);
  }

  const key = ({ group_id: group, sample }) => `${group}/${sample}`;

  // Give the chosen sample its tokens, which come with those of its step.
  async function loadTokens(sample) {
    if (!tokensOf.has(key(sample))) {
      try {
        const answer = await source.ofRun(run, "samples", { step: sample.step, limit: NEWEST, tokens: "" });
        if (tokensOf.size > KEPT_TOKENS) tokensOf.clear();
        for (const one of answer.samples) tokensOf.set(key(one), one.tokens ?? null);
      } catch (error) {
        notify(error.message, true);
      }
    }
    sample.tokens = tokensOf.get(key(sample)) ?? null;
    if (sample === chosen) showColours();
  }

  function choose(sample) {
    chosen = sample;
    if (sample && sample.tokens === undefined) loadTokens(sample);
    [...list.children].forEach((row, place) => row.setAttribute?.("aria-selected", String(shown[place] === sample)));
    showColours();
  }

  function showColours() {
    const known = Object.entries(COLOURS).filter(([name]) => name === "none" || values(name) !== null);
    const best = [wanted, "surprise", "none"].find((one) => known.some(([name]) => name === one));
    colour.replaceChildren(...known.map(([name, [label]]) => make("option", { value: name }, label)));
    colour.value = best;
    showOne();
  }

  // The chosen sample's numbers for a colouring; null if the run doesn't have them.
  function values(name) {
    if (!chosen?.tokens?.texts.length) return null;
    const found = COLOURS[name][1](chosen.tokens, chosen.step);
    return found?.length ? found : null;
  }

  function showOne() {
    if (!chosen) {
      one.replaceChildren(make("p", { class: "empty" }, "Choose a sample."));
      return;
    }
    const part = (name, ...children) => make("section", { class: "part" }, make("h2", {}, name), children);
    const { prompt, answer, conversation, media: shown, reward_parts: parts } = chosen;
    one.replaceChildren(...[
      make("section", { class: "part" }, make("dl", { class: "facts-list" }, facts().map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))),
      part("Prompt", make("div", { class: "written" }, prompt), media(shown)),
      conversation.length ? part(`Conversation, ${chosen.turns} ${chosen.turns === 1 ? "turn" : "turns"}`, conversation.map(turn)) : null,
      part(conversation.length ? "Last answer" : "Answer of the model", written()),
      answer ? part("Reference answer", make("div", { class: "written" }, answer)) : null,
      Object.keys(parts).length ? part("Parts of the reward", table([["part", ([name]) => name], ["value", ([, value]) => number(value), "number"]], Object.entries(parts))) : null,
    ].filter(Boolean));
  }

  function facts() {
    const found = [
      ["Group", chosen.group_id], ["Step", count(chosen.step)], ["Reward", number(chosen.reward)], ["Advantage", number(chosen.advantage)],
      ["Weights", `version ${chosen.version}`], ["Tokens", count(chosen.length)], ["Ended", chosen.finish_reason],
    ];
    if (chosen.turns) found.push(["Environment", `paid ${number(chosen.environment_reward)} and took ${number(chosen.environment_seconds)} s`]);
    const traces = [["group", chosen.trace_id], ["step", chosen.step_trace_id]].filter(([, id]) => source.traceUrl(id));
    found.push(["Trace", traces.length ? traces.flatMap(([words, id], place) => [place ? " · " : "", link(source.traceUrl(id), words)]) : make("code", {}, `relaxd trace ${chosen.group_id} --run ${run}`)]);
    return found;
  }

  function media(items) {
    return items.length ? make("div", { class: "media" }, items.map((item) => {
      const words = item.seconds ? `sound, ${item.seconds.toFixed(2)} s` : `${item.frames ? `video, ${item.frames} frames` : "image"}, ${item.width} × ${item.height}`;
      const seen = item.thumbnail.startsWith("data:image/jpeg;base64,") ? make("img", { src: item.thumbnail, alt: words }) : null;
      const heard = item.excerpt.startsWith("data:audio/wav;base64,") ? make("audio", { controls: true, preload: "none", src: item.excerpt, "aria-label": words }) : null;
      return make("figure", {}, seen, heard, make("figcaption", { class: "note" }, words));
    })) : null;
  }

  const turn = ({ role, content, tool_calls: calls }) => make("div", { class: `turn ${role}` },
    make("div", { class: "who" }, role), make("div", { class: "written" }, content), calls.map((call) => make("code", {}, `→ ${call}`)));

  // The answer, in tokens if the run has them.
  function written() {
    const { tokens } = chosen;
    if (!tokens?.texts.length) return make("div", { class: "written" }, chosen.response || "(nothing)");
    const numbers = values(colour.value), [label, , kind] = COLOURS[colour.value];
    const largest = numbers ? Math.max(1e-9, ...numbers.filter((_, place) => tokens.trained[place]).map(Math.abs)) : 1;
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const spans = tokens.texts.map((text, place) => {
      const value = numbers?.[place], trained = tokens.trained[place];
      const detail = [`token ${tokens.ids[place]}`, value === undefined || !trained ? "" : `${label}: ${number(value)}`].filter(Boolean).join(", ");
      const style = numbers && trained ? { backgroundColor: shade(value / largest, kind, dark) } : {};
      return make("span", { class: trained ? "" : "other", title: trained ? detail : `${detail}; not the model's`, style }, text);
    });
    const left = chosen.length - tokens.texts.length;
    return [
      make("div", { class: "tools" }, make("label", {}, "Colour ", colour),
        numbers ? [make("span", {}, kind === "diverging" ? number(-largest) : "0"), make("span", { class: `scale ${kind}`, "aria-hidden": "true" }), make("span", {}, number(largest))] : null),
      make("div", { class: "written" }, spans),
      left > 0 ? make("p", { class: "note" }, `… and ${count(left)} tokens more, which the run doesn't keep for the page`) : null,
    ];
  }

  // The colour of a number between -1 and 1.
  function shade(value, kind, dark) {
    const strength = (dark ? 0.55 : 0.6) * Math.min(1, Math.abs(value));
    const [red, green, blue] = kind === "rising" ? [224, 144, 47] : value > 0 ? [47, 158, 98] : [217, 84, 79];
    return `rgba(${red}, ${green}, ${blue}, ${strength.toFixed(3)})`;
  }

  function update(topic) {
    if (topic !== "metrics" || state.metrics.step <= loadedStep) return;
    if (samples.length) fresh.hidden = false;
    else load();
  }

  // The next or the previous sample.
  function move(by) {
    const next = shown[shown.indexOf(chosen) + by];
    if (!next) return;
    choose(next);
    list.children[shown.indexOf(next)]?.scrollIntoView({ block: "nearest" });
  }

  load();
  return { element, update, keys: { j: () => move(1), k: () => move(-1) }, close() {} };
}
