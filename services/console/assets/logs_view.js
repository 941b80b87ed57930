// The logs of the run's services: the newest lines of all, by time, or of one of them.
import { ofRun } from "./api.js";
import { clock, count, make } from "./shared/elements.js";

const REFRESH_MS = 3000;
const NEAR_END = 40; // pixels

export const title = "Logs";

export function create({ run }) {
  const service = make("select", { "aria-label": "service", onchange: load }, make("option", { value: "" }, "All services"));
  const text = make("input", { type: "search", placeholder: "Show lines with …", "aria-label": "show lines with", "data-search": "", onchange: load });
  const problems = make("input", { type: "checkbox", onchange: load });
  const total = make("span"), list = make("div", { class: "card log", tabIndex: 0, role: "log", "aria-label": "lines", "aria-live": "off" });
  const element = make("div", {}, make("div", { class: "tools" }, text, service, make("label", {}, problems, " Warnings and errors only"), total), list);
  let timer = 0, closed = false, shown = "", asked = 0;

  async function load() {
    clearTimeout(timer);
    const number = asked += 1;
    try {
      const answer = await ofRun(run, "logs", { service: service.value, text: text.value, ...(problems.checked ? { problems: "" } : {}) });
      if (!closed && number === asked) show(answer);
    } catch (error) {
      if (!closed && number === asked) list.replaceChildren(make("p", { class: "empty" }, error.message));
      shown = "";
    }
    if (!closed && number === asked) timer = setTimeout(load, REFRESH_MS);
  }

  function show({ lines, services }) {
    const known = JSON.stringify(lines);
    if (known === shown) return;
    shown = known;
    const chosen = service.value, atEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - NEAR_END;
    service.replaceChildren(make("option", { value: "" }, "All services"), ...services.map((name) => make("option", { value: name }, name)));
    service.value = chosen;
    total.textContent = `${count(lines.length)} lines`;
    list.replaceChildren(...lines.map((line) => make("div", { class: `line${line.is_problem ? " warn" : ""}` },
      make("span", { class: "who" }, line.service), make("span", { class: "when" }, line.log_time === undefined ? "" : clock(line.log_time)),
      make("span", { class: "text" }, line.text.replace(/^\d{4}-\d\d-\d\dT[\d:.]+Z /, ""))))); // its time is beside it
    if (!lines.length) list.append(make("p", { class: "empty" }, "No line matches."));
    if (atEnd) list.scrollTop = list.scrollHeight; // else somebody reads
  }

  load();
  return { element, update() {}, close() { closed = true; clearTimeout(timer); } };
}
