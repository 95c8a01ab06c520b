// The two charts over the last minute. Each has a legend with its values: the newest, or those under the pointer or at
// the place chosen with the arrow keys, with the time of day.
/* global uPlot */

import { $, NONE, clock, make, rate, text, time } from "./dom.js";

const LEAST_S = 1e-5; // a logarithmic axis has no zero
const CHARTS = {
  "chart-traffic": {
    log: false,
    show: (value) => `${rate(value)}/s`,
    series: [
      { name: "requests", colour: "flow", fill: "22" },
      { name: "refused", colour: "warn" },
      { name: "failed", colour: "bad" },
    ],
  },
  "chart-ttft": {
    log: true,
    show: time,
    series: [
      { name: "TTFT p95", colour: "second", fill: "1e", dots: true },
      { name: "budget", colour: "bad", dashed: true },
    ],
  },
};
const charts = new Map();
let shown = null; // the newest frame

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The lowest and highest value of the axis. The budget is one of the values: it always lies inside.
export function bounds(rows, log) {
  const values = rows.flat().filter((value) => value !== null);
  const most = Math.max(...values, 0);
  if (!log) return [0, most > 0 ? most * 1.15 : 1];
  if (!values.length) return [0.01, 10];
  const least = Math.min(...values);
  return [Math.min(least / 1.6, most / 20), most * 1.6];
}

// Ticks of a logarithmic axis: 1, 2 and 5 of each power of ten, or 1 alone where there are many powers.
function ticks(least, most) {
  const found = [];
  const steps = most / least > 300 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power += 1) {
    for (const step of steps) found.push(Number(`${step}e${power}`));
  }
  return found.filter((value) => value >= least && value <= most);
}

const tick = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);

function options(host, kind, chart) {
  const axis = { stroke: css("soft"), grid: { stroke: css("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const linear = { ...axis, size: 52, values: (_, all) => all.map((value) => `${Number(value.toPrecision(3))}/s`) };
  const logarithmic = { ...axis, size: 58, splits: (_, __, least, most) => ticks(least, most), filter: (_, all) => all, values: (_, all) => all.map(tick) };
  return {
    width: host.clientWidth,
    height: host.clientHeight,
    legend: { show: false },
    padding: [6, 18, 0, 0],
    cursor: { y: false, drag: { x: false, y: false } },
    hooks: { setCursor: [() => legend(chart)] },
    scales: { x: { time: false, range: () => [-60, 0] }, y: { distr: kind.log ? 3 : 1, range: () => chart.bounds } },
    axes: [{ ...axis, size: 24, values: (_, all) => all.map((at) => (at ? `${at} s` : "now")) }, kind.log ? logarithmic : linear],
    series: [{}, ...kind.series.map(line)],
  };
}

function line({ name, colour, fill, dots, dashed }) {
  const points = dots ? { show: true, size: 4, fill: css(colour) } : { show: false };
  return {
    label: name, stroke: css(colour), width: dashed ? 1.2 : 1.8, points, spanGaps: Boolean(dots),
    ...(fill ? { fill: `${css(colour)}${fill}` } : {}), ...(dashed ? { dash: [5, 5] } : {}),
  };
}

// The legend: each line's name and value, and when that was.
function legend(chart) {
  const { plot, kind, values, when } = chart;
  if (!plot || !shown) return;
  const [ago, ...rows] = plot.data;
  const index = plot.cursor.idx;
  const hovered = index !== null && index !== undefined && index < ago.length;
  const place = hovered ? index : ago.length - 1;
  text(when, hovered ? `${clock(shown.at + ago[place])}, ${Math.max(0, -ago[place]).toFixed(0)} s ago` : "now");
  rows.forEach((row, number) => {
    const value = row[place];
    text(values[number], value === null || value === undefined ? NONE : kind.show(value));
  });
}

// Arrow keys move through the values of a chart that has the focus; Escape returns to the newest.
function move(chart, event) {
  const { plot } = chart;
  const last = plot.data[0].length - 1;
  const from = plot.cursor.idx ?? last + 1;
  const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, Escape: null }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  const place = to === null ? null : Math.min(last, Math.max(0, to));
  plot.setCursor(place === null ? { left: -10, top: -10 } : { left: plot.valToPos(plot.data[0][place], "x"), top: 1 });
  text($("chart-said"), place === null ? "" : $(`${plot.root.parentNode.id}-legend`).textContent);
}

function create(id) {
  const [host, kind] = [$(id), CHARTS[id]];
  const chart = { kind, bounds: kind.log ? [0.01, 10] : [0, 1], plot: null, when: make("span", { class: "when" }, "now") };
  chart.values = kind.series.map(() => make("b", {}, NONE));
  const items = kind.series.map(({ name, colour, dashed }, number) =>
    make("span", {}, make("i", { class: `swatch k-${colour} ${dashed ? "dashed" : ""}` }), `${name} `, chart.values[number]));
  $(`${id}-legend`).replaceChildren(...items, chart.when);
  chart.plot = new uPlot(options(host, kind, chart), [[], ...kind.series.map(() => [])], host);
  charts.set(id, chart);
}

export function buildCharts() {
  for (const chart of charts.values()) chart.plot.destroy();
  for (const id of Object.keys(CHARTS)) create(id);
  if (shown) drawCharts(shown);
}

function fill(id, ago, rows) {
  const chart = charts.get(id);
  chart.bounds = bounds(rows, chart.kind.log);
  chart.plot.setData([ago, ...rows]);
  legend(chart);
}

export function drawCharts(frame) {
  shown = frame;
  const past = frame.history;
  fill("chart-traffic", past.ago_s, [past.requests_per_s, past.shed_per_s, past.errors_per_s]);
  const ttft = past.ttft_p95_s.map((value) => (value === null ? null : Math.max(value, LEAST_S)));
  fill("chart-ttft", past.ago_s, [ttft, past.ago_s.map(() => frame.totals.ttft.budget_s)]);
}

export function startCharts() {
  buildCharts();
  for (const id of Object.keys(CHARTS)) {
    $(id).addEventListener("keydown", (event) => move(charts.get(id), event));
    $(id).addEventListener("blur", () => charts.get(id).plot.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => charts.get(id).plot.setSize({ width: $(id).clientWidth, height: $(id).clientHeight })).observe($(id));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", buildCharts);
}
