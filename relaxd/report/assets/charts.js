// The charts of chart_data() in charts.py, for the report of a run and for the console. All share the steps that are
// shown and the step under the mouse.
"use strict";
globalThis.relaxdCharts = (() => {
  const HEIGHT = 190;
  const DASHES = [[], [7, 4], [2, 3], [11, 4, 2, 4]]; // of the lines of the first run, the second ...
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
  const SECONDS = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 172800, 604800];

  // An exponential mean without a bias towards its start (Adam, arXiv 1412.6980, section 3), of the values there are.
  function smooth(values, smoothing) {
    if (!smoothing) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
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

  // A time since the first step, such as "1:20 h".
  function clock(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const minutes = Math.floor(seconds / 60), two = (value) => String(Math.floor(value)).padStart(2, "0");
    if (minutes < 60) return `${minutes}:${two(seconds % 60)}`;
    return `${Math.floor(minutes / 60)}:${two(minutes % 60)} h`;
  }

  function make(parent, tag, text, name) {
    const element = parent.appendChild(document.createElement(tag));
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  }

  const drawable = (values, log) => (log ? values.map((value) => (value > 0 ? value : null)) : values);

  // The charts of runs, each { name, data } with the data of chart_data(), within an element.
  class Charts {
    #page;
    #runs = [];
    #plots = new Map(); // drawn charts, by their element
    #charts = new Map(); // the charts' descriptions, by their element
    #shape = "";
    #smoothing = 0;
    #filter = "";
    #log = false;
    #byTime = false;
    #range = null; // [first, last] step or second shown; null shows all
    #showing = false;

    constructor(page) {
      this.#page = page;
      this.seen = new IntersectionObserver((entries) => {
        for (const { target, isIntersecting } of entries) if (isIntersecting && this.#missing(target)) this.#draw(target);
      }, { rootMargin: "400px" });
      this.resized = new ResizeObserver((entries) => {
        for (const { target } of entries) {
          this.#plots.get(target)?.plot.setSize({ width: target.clientWidth - 18, height: HEIGHT });
        }
      });
    }

    set runs(runs) {
      this.#runs = runs;
      const shape = JSON.stringify(runs.map(({ name, data }) => [
        name, data.sections.map(({ title, charts }) => [title, charts.map((chart) => [chart.title, chart.kind, chart.lines.map((line) => line.name)])]),
      ]));
      if (shape === this.#shape) this.#refresh();
      else this.#build();
      this.#shape = shape;
    }

    set smoothing(value) {
      this.#smoothing = value;
      for (const { plot, series } of this.#plots.values()) {
        plot.batch(() => {
          series.forEach((one, place) => {
            if (one.raw) plot.setSeries(place + 1, { show: value > 0 && plot.series[one.smoothed + 1].show });
          });
        });
      }
      this.#refresh();
    }

    set filter(word) {
      this.#filter = word.toLowerCase();
      for (const [element, chart] of this.#charts) {
        const text = [chart.title, ...chart.lines.map((line) => line.name)].join(" ").toLowerCase();
        element.hidden = !text.includes(this.#filter);
      }
      for (const part of this.#page.querySelectorAll("section")) part.hidden = !part.querySelector(".chart:not([hidden])");
    }

    set log(value) {
      this.#log = value;
      this.#build();
    }

    set byTime(value) {
      this.#byTime = value;
      this.#range = null;
      this.#build();
    }

    // Show all steps.
    showAll() {
      this.#show(null, null);
    }

    close() {
      for (const { plot } of this.#plots.values()) plot.destroy();
      this.#plots.clear();
      this.#charts.clear();
      this.seen.disconnect();
      this.resized.disconnect();
      this.#page.replaceChildren();
    }

    #build() {
      this.close();
      const sections = new Map(); // by title, the charts by title
      for (const { data } of this.#runs) {
        for (const section of data.sections) {
          const known = sections.get(section.title) ?? new Map();
          for (const chart of section.charts) if (!known.has(chart.title)) known.set(chart.title, chart);
          sections.set(section.title, known);
        }
      }
      for (const [title, charts] of sections) {
        const part = make(this.#page, "section");
        make(part, "h2", title);
        const row = make(part, "div", "", "grid");
        for (const chart of charts.values()) {
          const element = make(row, "div", "", "chart");
          const words = [chart.unit, chart.left_out ? `the ${chart.lines.length} largest of ${chart.lines.length + chart.left_out}` : ""];
          make(make(element, "h3", chart.title + " "), "small", words.filter(Boolean).join(" · "));
          if (chart.lines.length === 1) element.title = chart.lines[0].meaning;
          this.#charts.set(element, { ...chart, section: title });
          this.seen.observe(element);
          this.resized.observe(element);
        }
      }
      if (!sections.size) make(this.#page, "p", "No step has ended yet.");
      if (this.#filter) this.filter = this.#filter;
      // What the window shows is drawn now, the rest one by one, so that each chart is there before it is scrolled to.
      for (const element of this.#charts.keys()) {
        if (element.getBoundingClientRect().top < innerHeight && this.#missing(element)) this.#draw(element);
      }
      this.#drawNext(this.#charts.keys().next().value);
      this.#page.dataset.drawn = String(this.#charts.size);
    }

    // Draw what is still missing, unless the charts have been made anew since.
    #drawNext(first) {
      if (this.#charts.keys().next().value !== first) return;
      const next = [...this.#charts.keys()].find((element) => this.#missing(element));
      if (!next) return;
      this.#draw(next);
      setTimeout(() => this.#drawNext(first));
    }

    #missing(element) {
      return !this.#plots.has(element) && element.clientWidth > 0; // a hidden one has no width
    }

    #axis(data) {
      if (!this.#byTime) return data.steps;
      const first = data.times.find((time) => time !== null) ?? 0;
      return data.times.map((time, place) => (time === null ? place : time - first));
    }

    // The runs that have a chart, with it. A stack is that of the first run alone.
    #runsWith(chart) {
      const found = this.#runs.flatMap(({ name, data }, place) => {
        const own = data.sections.find((one) => one.title === chart.section)?.charts.find((one) => one.title === chart.title);
        return own ? [{ name, data, place, chart: own }] : [];
      });
      return chart.kind === "stack" ? found.slice(0, 1) : found;
    }

    // The series of a chart, in uPlot's order without the first one: { line, run, raw, smoothed, values }.
    #series(chart) {
      if (chart.kind === "stack") { // sums of the parts below, the top one first, so that each is painted over the ones above
        const [run] = this.#runsWith(chart), sums = [];
        for (const line of run.chart.lines) {
          const part = smooth(line.values, this.#smoothing), below = sums.at(-1);
          sums.push(below ? part.map((value, place) => (value === null ? null : value + below[place])) : part);
        }
        return run.chart.lines.map((line, place) => ({ line, run, values: sums[place] })).reverse();
      }
      const series = [], log = chart.kind === "log" || this.#log;
      for (const run of this.#runsWith(chart)) {
        const { lines } = run.chart;
        lines.forEach((line) => series.push({ line, run, raw: true, smoothed: series.length + lines.length, values: drawable(line.values, log) }));
        lines.forEach((line) => series.push({ line, run, values: drawable(smooth(line.values, this.#smoothing), log) }));
      }
      return series;
    }

    #columns(chart, series) {
      const tables = this.#runsWith(chart).map(({ data, place }) => [
        this.#axis(data), ...series.filter(({ run }) => run.place === place).map(({ values }) => values),
      ]);
      return tables.length === 1 ? tables[0] : uPlot.join(tables);
    }

    #options(one, chart, several) {
      const { line, run, raw } = one, dash = DASHES[run.place % DASHES.length];
      if (chart.kind === "stack") {
        const value = (plot, _, place, index) => number(index === null ? null : line.values[index]);
        return { label: line.name, stroke: line.color, fill: line.color, width: 0, points: { show: false }, value };
      }
      if (raw) {
        const show = this.#smoothing > 0;
        return { label: line.name, class: "raw", stroke: line.color + "48", width: 1, spanGaps: true, show, points: { show: false } };
      }
      const points = chart.kind === "points" ? { points: { show: true, size: 6 } } : {};
      const name = several ? `${line.name} · ${run.name}` : line.name;
      return { label: name, stroke: line.color, width: 1.6, dash, spanGaps: true, value: (_, value) => number(value), ...points };
    }

    #draw(element) {
      const chart = this.#charts.get(element), series = this.#series(chart);
      const colour = (name) => getComputedStyle(document.body).getPropertyValue(name);
      const soft = colour("--soft"), line = colour("--line");
      const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, font: "11px system-ui" };
      const time = this.#byTime, log = chart.kind === "log" || (this.#log && chart.kind !== "stack");
      const labels = time ? { values: (_, splits) => splits.map(clock) } : {};
      const plot = new uPlot(
        {
          width: element.clientWidth - 18,
          height: HEIGHT,
          scales: {
            x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
            y: log ? { distr: 3 } : chart.kind === "stack" ? { range: (_, low, high) => [0, high] } : {},
          },
          axes: [
            { ...axis, incrs: time ? SECONDS : STEPS, size: 28, ...labels },
            { ...axis, size: 62, values: (_, splits, place, space, step) => splits.map((split) => label(split, step)) },
          ],
          cursor: {
            y: false,
            drag: { x: true, y: false },
            sync: { key: "relaxd", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
          },
          legend: { live: true },
          series: [
            { label: time ? "time" : "step", ...(time ? { value: (_, value) => clock(value) } : {}) },
            ...series.map((one) => this.#options(one, chart, this.#runs.length > 1)),
          ],
          hooks: {
            setScale: [(one, name) => { if (name === "x") this.#show([one.scales.x.min, one.scales.x.max], one); }],
            setSeries: [(one, place, change) => { // a hidden line hides its raw values, too
              const raw = series.findIndex(({ smoothed }) => smoothed === place - 1);
              if (raw >= 0 && change.show !== undefined) one.setSeries(raw + 1, { show: change.show && this.#smoothing > 0 });
            }],
          },
        },
        this.#columns(chart, series),
        element,
      );
      this.#plots.set(element, { plot, chart, series });
      if (this.#range) plot.setScale("x", { min: this.#range[0], max: this.#range[1] });
      const shown = series.filter(({ raw }) => !raw);
      plot.root.querySelectorAll(".u-series:not(.raw) th").forEach((cell, place) => {
        if (shown[place - 1]) cell.title = shown[place - 1].line.meaning;
      });
    }

    // Give the drawn charts the runs' newest values.
    #refresh() {
      const [min, max] = this.#range ?? this.#ends();
      for (const [element, drawn] of this.#plots) {
        const chart = this.#charts.get(element);
        drawn.series = this.#series(chart);
        drawn.plot.batch(() => {
          drawn.plot.setData(this.#columns(chart, drawn.series), false);
          drawn.plot.setScale("x", { min, max });
        });
      }
    }

    // The first and the last step of any run.
    #ends() {
      const axes = this.#runs.map(({ data }) => this.#axis(data)).filter(({ length }) => length);
      return [Math.min(...axes.map((axis) => axis[0])), Math.max(...axes.map((axis) => axis.at(-1)))];
    }

    // Show these steps in all charts; `from` shows them already.
    #show(steps, from) {
      if (this.#showing || !this.#runs.length) return;
      this.#showing = true;
      const ends = this.#ends(), all = steps === null || (steps[0] <= ends[0] && steps[1] >= ends[1]);
      this.#range = all ? null : steps;
      const [min, max] = this.#range ?? ends;
      for (const { plot } of this.#plots.values()) if (plot !== from) plot.setScale("x", { min, max });
      this.#showing = false;
    }
  }

  return { Charts, number, clock };
})();
