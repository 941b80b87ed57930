// The results of a run: what it reached, what it was trained with, where its time went, and its steps.
import { card, figure, make, table } from "./elements.js";

export const title = "Results";

export function create({ run, source }) {
  const element = make("div");

  // A table whose cells are texts, with the numbers of all but the first column on the right.
  const texts = ({ head, rows }) => table(head.map((name, place) => [name, (row) => row[place], place ? "number" : ""]), rows);

  const part = ({ label, color }) => [color ? make("i", { class: "mark", style: { background: color } }) : null, label];

  function show({ cards, facts, alarms, notes, outside, times, steps, newest }) {
    element.replaceChildren(...[
      ...alarms.map((alarm) => make("div", { class: "says alarm" }, alarm)),
      ...notes.map((note) => make("div", { class: "says" }, note)),
      make("div", { class: "row four" }, cards.map(([name, value, note]) => figure(name, value, note))),
      facts.length ? make("div", { class: "row" }, card("What was trained", make("dl", { class: "facts-list" }, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])))) : null,
      make("h2", {}, "Where the time went"),
      outside ? make("p", { class: "note" }, outside) : null,
      make("div", { class: "row two" }, times.length ? times.map(({ title: name, rows, seconds }) => card(name, table(
        [["", part], ...(seconds ? [["mean s", (row) => row.seconds, "number"]] : []), ["share", (row) => row.share, "number"]], rows))) : card("No step has ended yet")),
      make("h2", {}, "Steps"),
      newest ? make("p", { class: "note" }, newest) : null,
      make("div", { class: "row" }, make("section", { class: "card" }, texts(steps))),
    ].filter(Boolean));
  }

  source.ofRun(run, "results").then(show);
  return { element, update() {}, close() {} };
}
