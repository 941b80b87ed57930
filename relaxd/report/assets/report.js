// Draws the charts of chart_data() in charts.py. All charts share the steps that are shown and the step under the mouse.
"use strict";
(async () => {
  const HEIGHT = 190;
  const page = document.getElementById("charts");
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const plots = new Map(); // drawn charts, by their element
  const soft = getComputedStyle(document.body).getPropertyValue("--soft");
  const grid = getComputedStyle(document.body).getPropertyValue("--line");
  let smoothing = 0;
  let range = null; // [first, last] step shown; null shows all

  // An exponential mean without a bias towards its start (Adam, arXiv 1412.6980, section 3), of the values there are.
  function smooth(values) {
    if (!smoothing) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  // Columns for uPlot: the steps, each line as it is (but of a stack), each line smoothed. A stack's lines are sums of
  // the parts below, the top one first, so that each is painted over the ones above.
  function columns(chart) {
    const smoothed = chart.lines.map((line) => smooth(line.values));
    if (chart.kind === "stack") {
      const sums = [];
      for (const part of smoothed) {
        const below = sums.at(-1);
        sums.push(below ? part.map((value, i) => (value === null ? null : value + below[i])) : part);
      }
      return [data.steps, ...sums.reverse()];
    }
    const drawable = (values) => (chart.kind === "log" ? values.map((value) => (value > 0 ? value : null)) : values);
    return [data.steps, ...chart.lines.map((line) => drawable(line.values)), ...smoothed.map(drawable)];
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 7 : 4 });
  }

  // An axis label, with as many digits as tell it from the next one.
  function label(value, step) {
    if (value === null) return "";
    const digits = Math.ceil(-Math.log10(step || 1));
    if (!(digits > 2) || digits > 6 || Math.abs(value) < 1e-3) return number(value);
    return value.toLocaleString("en", { maximumFractionDigits: digits });
  }

  function series(chart) {
    const value = (line) => (plot, _, place, step) => number(step === null ? null : line.values[step]);
    if (chart.kind === "stack") {
      const parts = [...chart.lines].reverse();
      return parts.map((line) => ({
        label: line.name, stroke: line.color, fill: line.color, width: 0, points: { show: false }, value: value(line),
      }));
    }
    const points = chart.kind === "points" ? { points: { show: true, size: 6 } } : {};
    return [
      ...chart.lines.map((line) => ({
        label: line.name, class: "raw", stroke: line.color + "48", width: 1, spanGaps: true, show: smoothing > 0,
        points: { show: false },
      })),
      ...chart.lines.map((line) => ({
        label: line.name, stroke: line.color, width: 1.6, spanGaps: true, value: value(line), ...points,
      })),
    ];
  }

  function draw(element, chart) {
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, font: "11px system-ui" };
    const count = chart.lines.length;
    const plot = new uPlot(
      {
        width: element.clientWidth - 18,
        height: HEIGHT,
        scales: {
          x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y: chart.kind === "log" ? { distr: 3 } : chart.kind === "stack" ? { range: (_, low, high) => [0, high] } : {},
        },
        axes: [
          { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6], size: 28 },
          { ...axis, size: 62, values: (_, splits, place, space, step) => splits.map((split) => label(split, step)) },
        ],
        cursor: {
          y: false,
          drag: { x: true, y: false },
          sync: { key: "relaxd", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        },
        legend: { live: true },
        series: [{ label: "step" }, ...series(chart)],
        hooks: {
          setScale: [(one, name) => { if (name === "x") show([one.scales.x.min, one.scales.x.max], one); }],
          setSeries: [(one, place, change) => { // a hidden line hides its raw values, too
            if (chart.kind !== "stack" && place > count && change.show !== undefined) {
              one.setSeries(place - count, { show: change.show && smoothing > 0 });
            }
          }],
        },
      },
      columns(chart),
      element,
    );
    plots.set(element, { plot, chart });
    if (range) plot.setScale("x", { min: range[0], max: range[1] });
    plot.root.querySelectorAll(".u-series:not(.raw) th").forEach((cell, place) => {
      const line = (chart.kind === "stack" ? [...chart.lines].reverse() : chart.lines)[place - 1];
      if (line) cell.title = line.meaning;
    });
  }

  // Show these steps in all charts; `from` shows them already.
  let showing = false;
  function show(steps, from) {
    if (showing) return;
    showing = true;
    const all = steps === null || (steps[0] <= data.steps[0] && steps[1] >= data.steps.at(-1));
    range = all ? null : steps;
    const [min, max] = range ?? [data.steps[0], data.steps.at(-1)];
    for (const { plot } of plots.values()) if (plot !== from) plot.setScale("x", { min, max });
    showing = false;
  }

  const missing = (element) => !plots.has(element) && element.clientWidth > 0; // a hidden one has no width
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && missing(target)) draw(target, charts.get(target));
    }
  }, { rootMargin: "400px" });
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) plots.get(target)?.plot.setSize({ width: target.clientWidth - 18, height: HEIGHT });
  });

  function make(parent, tag, text, name) {
    const element = parent.appendChild(document.createElement(tag));
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  }

  const charts = new Map(); // the charts' descriptions, by their element
  for (const section of data.sections) {
    const part = make(page, "section");
    make(part, "h2", section.title);
    const row = make(part, "div", "", "grid");
    for (const chart of section.charts) {
      const element = make(row, "div", "", "chart");
      const title = make(element, "h3", chart.title + " ");
      const words = [chart.unit, chart.left_out ? `the ${chart.lines.length} largest of ${chart.lines.length + chart.left_out}` : ""];
      make(title, "small", words.filter(Boolean).join(" · "));
      if (chart.lines.length === 1) element.title = chart.lines[0].meaning;
      charts.set(element, chart);
      seen.observe(element);
      resized.observe(element);
    }
  }
  if (!data.sections.length) make(page, "p", "no step has ended yet");

  // What the window shows is drawn now, the rest one by one, so that each chart is there before it is scrolled to.
  for (const element of charts.keys()) {
    if (element.getBoundingClientRect().top < innerHeight && missing(element)) draw(element, charts.get(element));
  }
  (function drawNext() {
    const next = [...charts.keys()].find(missing);
    if (!next) return;
    draw(next, charts.get(next));
    setTimeout(drawNext);
  })();

  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    slider.nextElementSibling.textContent = slider.value;
    for (const { plot, chart } of plots.values()) {
      const lines = chart.kind === "stack" ? 0 : chart.lines.length;
      plot.batch(() => {
        plot.setData(columns(chart), false);
        for (let place = 1; place <= lines; place++) {
          plot.setSeries(place, { show: smoothing > 0 && plot.series[place + lines].show });
        }
        const [min, max] = range ?? [data.steps[0], data.steps.at(-1)];
        plot.setScale("x", { min, max });
      });
    }
  });
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const word = filter.value.toLowerCase();
    for (const [element, chart] of charts) {
      const text = [chart.title, ...chart.lines.map((line) => line.name)].join(" ").toLowerCase();
      element.hidden = !text.includes(word);
    }
    for (const part of page.querySelectorAll("section")) part.hidden = !part.querySelector(".chart:not([hidden])");
  });
  document.getElementById("reset").addEventListener("click", () => show(null, null));
  page.dataset.drawn = String(charts.size);
})();
