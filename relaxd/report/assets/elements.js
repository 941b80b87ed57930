// Elements of the page, and numbers and times as people read them.

// Make an element: properties, attributes (data-*, aria-*, role, colspan), listeners (onclick), then its children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && !name.startsWith("aria-")) element[name] = value;
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const count = (value) => Number(value ?? 0).toLocaleString("en");

// A count that has little room, such as 4.43M.
export const short = (value) => (value < 1e5 ? count(value) : Number(value).toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 }));

export function number(value) {
  return Math.abs(value) >= 1000 ? count(Math.round(value)) : relaxdCharts.number(value);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toPrecision(2)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export const ago = (time) => `${duration(Math.max(0, Date.now() / 1000 - time))} ago`;

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

export const moment = (time) => new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

export const bytes = (value) => {
  const power = value > 0 ? Math.min(4, Math.floor(Math.log(value) / Math.log(1024))) : 0;
  return `${(value / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};

// A table whose columns are [title, cell(row), kind]; kind is "number" or "".
export function table(columns, rows, empty = "Nothing yet.") {
  if (!rows.length) return make("p", { class: "empty" }, empty);
  const head = columns.map(([title, , kind]) => make("th", { class: kind ?? "", scope: "col" }, title));
  const body = rows.map((row) => make("tr", {}, columns.map(([, cell, kind]) => make("td", { class: kind ?? "" }, cell(row) ?? ""))));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}

// The links to views, each { title }, by their names; `address` gives a view's.
export const viewLinks = (views, current, address) => Object.entries(views).map(([name, { title }], place) => make("a", {
  href: address(name), "aria-current": name === current ? "page" : undefined, "aria-keyshortcuts": String(place + 1),
}, title, make("kbd", { "aria-hidden": "true" }, String(place + 1))));

// Do what a key stands for, by `actions`; in a field only Escape does something: it leaves it.
export function press(event, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
  } else if (actions[event.key]) {
    actions[event.key]();
    event.preventDefault();
  }
}

// The keys of views, which `choose` opens, and those of the one that is open.
export const viewKeys = (views, choose, view) => ({
  ...Object.fromEntries(Object.keys(views).map((name, place) => [String(place + 1), () => choose(name)])),
  "/": () => document.querySelector("#view [data-search]")?.focus(),
  ...view?.keys,
});

// A link to another page, which opens beside this one.
export const link = (href, text) => make("a", { href, target: "_blank", rel: "noopener" }, text);

export function card(title, ...children) {
  return make("section", { class: "card" }, make("h2", {}, title), children);
}

export function figure(title, value, note = "") {
  return card(title, make("div", { class: "value" }, value), make("div", { class: "note" }, note));
}

const KINDS = {
  running: "accent", ready: "good", healthy: "good", active: "good", done: "good", stopped: "good", trained: "good",
  paused: "warn", pending: "warn", stopping: "warn", starting: "warn", draining: "warn", suspect: "warn", partial: "warn",
  restarting: "warn", quarantined: "warn", rebuilding: "warn", creating: "warn", syncing: "warn", removing: "warn",
  failed: "bad",
};

export const pill = (state) => make("span", { class: `pill ${KINDS[state] ?? ""}` }, state || "unknown");

let hiding;

// Tell the viewer what was done, or why not.
export function notify(text, bad = false) {
  const notice = document.getElementById("notice");
  notice.textContent = text;
  notice.className = `notice${bad ? " bad" : ""}`;
  notice.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { notice.hidden = true; }, bad ? 9000 : 4000);
}

// Ask in a dialog. `fields` are elements; returns true if the viewer goes on.
export function ask(title, text, fields, button, danger = false) {
  const dialog = document.getElementById("dialog");
  const form = make("form", { method: "dialog", onsubmit: () => dialog.close("yes") },
    make("h2", {}, title), make("p", {}, text), fields,
    make("div", { class: "buttons" },
      button ? make("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel") : null,
      make("button", { type: "submit", class: danger ? "danger" : "main" }, button || "Close")));
  dialog.replaceChildren(form);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}
