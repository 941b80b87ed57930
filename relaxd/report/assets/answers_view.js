// The results of evaluations, and each set's first and newest answers side by side.
import { card, make, table } from "./elements.js";

export const title = "Evaluations";

export function create({ run, source }) {
  const element = make("div");
  const texts = ({ head, rows }) => table(head.map((name, place) => [name, (row) => make("div", { class: "answer" }, row[place])]), rows);

  function show({ results, sets }) {
    element.replaceChildren(make("div", { class: "row" }, card("Results on each set", texts(results))),
      ...sets.map((set) => make("div", { class: "row" }, card(`Answers: ${set.name}`, set.more ? make("p", { class: "note" }, set.more) : null, texts(set)))));
    if (!results.rows.length) element.replaceChildren(make("p", { class: "empty" }, "Nothing was evaluated."));
  }

  source.ofRun(run, "answers").then(show);
  return { element, update() {}, close() {} };
}
