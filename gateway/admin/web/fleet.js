// The fleet: a tile per group and a sortable table. Broken groups come first unless another column is chosen.

import { $, NONE, arrange, count, draw, gauge, make, percent, redraw, setSetting, setting, span, text, time, whole, words } from "./dom.js";

const [OUT, IMPAIRED, ON_TRIAL] = [5, 4, 3]; // severities, as /live grades them
const SPARK = { width: 120, height: 22 };

export const isOut = (endpoint) => endpoint.severity >= OUT;
const grade = ({ severity }) => (severity >= OUT ? "bad" : severity >= ON_TRIAL ? "warn" : severity ? "off" : "");

// Sorting

// By data-sort of a heading: what is compared, and whether the first click puts the largest on top.
const COLUMNS = {
  name: { value: (endpoint) => endpoint.name },
  role: { value: (endpoint) => endpoint.role },
  layout: { value: (endpoint) => endpoint.layout },
  state: { value: (endpoint) => endpoint.severity * 10 + (endpoint.state === "dead" ? 1 : 0), largest: true },
  in_flight: { value: (endpoint) => endpoint.in_flight, largest: true },
  spark: { value: (endpoint) => Math.max(0, ...endpoint.spark), largest: true },
  kv: { value: (endpoint) => endpoint.kv, largest: true },
  waiting: { value: (endpoint) => endpoint.waiting, largest: true },
  backlog: { value: (endpoint) => endpoint.backlog_tokens, largest: true },
  hit: { value: (endpoint) => endpoint.hit, largest: true },
  ttft: { value: (endpoint) => endpoint.ttft_p95_s, largest: true },
  tpot: { value: (endpoint) => endpoint.tpot_p95_s, largest: true },
  silent: { value: (endpoint) => endpoint.silence_s, largest: true },
};
const BROKEN_FIRST = { column: "state", largest: true };
const collator = new Intl.Collator(undefined, { numeric: true });

function readOrder() {
  const said = setting("sort");
  const column = said.replace(/^-/, "");
  return Object.hasOwn(COLUMNS, column) ? { column, largest: said.startsWith("-") } : BROKEN_FIRST;
}

let order = readOrder();

function compare(one, other) {
  const { value } = COLUMNS[order.column];
  const [a, b] = [value(one), value(other)];
  if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last
  const difference = typeof a === "string" ? collator.compare(a, b) : a - b;
  return order.largest ? -difference : difference;
}

function sortBy(column) {
  const largest = order.column === column ? !order.largest : Boolean(COLUMNS[column].largest);
  order = { column, largest };
  const isUsual = column === BROKEN_FIRST.column && largest === BROKEN_FIRST.largest;
  setSetting("sort", isUsual ? "" : `${largest ? "-" : ""}${column}`);
  markHeadings();
}

function markHeadings() {
  for (const heading of document.querySelectorAll("#fleet th[data-sort]")) {
    const chosen = heading.dataset.sort === order.column;
    heading.setAttribute("aria-sort", chosen ? (order.largest ? "descending" : "ascending") : "none");
  }
}

// Tiles

function gpus(layout) {
  const size = (name) => Number((layout.match(new RegExp(`\\b${name}(\\d+)`)) || [0, 1])[1]);
  return [Math.min(size("tp"), 16), Math.min(size("pp") * size("dp"), 8)];
}

function tile(endpoint) {
  const [across, down] = gpus(endpoint.layout);
  const lit = Math.ceil((endpoint.kv || 0) * across * down);
  const squares = make("span", { class: "gpus", "aria-hidden": "true" });
  squares.style.gridTemplateColumns = `repeat(${across}, 10px)`;
  for (let at = 0; at < across * down; at += 1) squares.append(make("i", { class: at < lit ? "on" : "" }));
  const says = isOut(endpoint) || grade(endpoint) === "off" ? endpoint.state : `${endpoint.in_flight} in flight`;
  const title = `${endpoint.name}: ${endpoint.layout}, ${endpoint.url}, ${percent(endpoint.kv)} of KV used`;
  return make("div", { class: `tile ${grade(endpoint)}`, title }, make("b", {}, endpoint.name), squares, make("span", { class: "n" }, says));
}

function map(shown) {
  const groups = new Map();
  for (const endpoint of shown) {
    const title = endpoint.role === "both" ? endpoint.pool : `${endpoint.pool}, ${endpoint.role}`;
    groups.set(title, [...(groups.get(title) || []), endpoint]);
  }
  const plain = [...groups].map(([title, list]) => [title, list.map(({ name, state, severity, in_flight, kv, layout }) => [name, state, severity, in_flight, kv && kv.toFixed(2), layout])]);
  redraw("map", plain, () => [...groups].map(([title, list]) => make("div", {}, make("h3", {}, title), make("div", { class: "tiles" }, ...list.map(tile)))));
}

// Rows

const rows = new Map();
let operating = false;
let pointed = false;

function tip(event, sentence) {
  const node = $("tip");
  text(node, sentence);
  node.hidden = false;
  node.style.left = `${Math.min(event.clientX + 12, innerWidth - node.offsetWidth - 8)}px`;
  node.style.top = `${Math.max(4, event.clientY - 34)}px`;
}

function sparkline(row) {
  const [line, area] = [draw("polyline"), draw("polygon")];
  const node = draw("svg", { class: "line", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    const last = row.values.length - 1;
    const place = Math.min(last, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * last)));
    if (last >= 0) tip(event, `${last - place} s ago: ${count(row.values[place], "request")} in flight`);
  });
  node.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  const set = (values) => {
    const most = Math.max(4, ...values);
    const points = values.map((value, at) => `${(at * SPARK.width) / (values.length - 1)},${(SPARK.height - 1 - (value / most) * 20).toFixed(1)}`).join(" ");
    line.setAttribute("points", points);
    area.setAttribute("points", `0,${SPARK.height} ${points} ${SPARK.width},${SPARK.height}`);
  };
  return { node, set };
}

function createRow(endpoint) {
  const cell = (name = "") => make("td", { class: name });
  const row = {
    name: make("th", { scope: "row" }), role: cell(), layout: cell("dim"), state: cell("state"), flight: cell(), spark: cell("spark"), kv: cell(),
    waiting: cell("num"), backlog: cell("num"), hit: cell("num"), ttft: cell("num"), tpot: cell("num"), silent: cell("num"), act: cell("act"),
    flightGauge: gauge(), kvGauge: gauge(), flightText: make("span"), kvText: make("span"), said: make("span"), more: make("small"),
    most: make("small"), values: [], button: make("button", { type: "button" }),
  };
  row.line = sparkline(row);
  row.flight.append(row.flightGauge.node, row.flightText);
  row.kv.append(row.kvGauge.node, row.kvText);
  row.state.append(row.said, row.more);
  row.spark.append(row.line.node, row.most);
  row.button.addEventListener("click", () => row.act.dispatchEvent(new CustomEvent("drain", { bubbles: true, detail: endpoint.name })));
  row.act.append(row.button);
  const { name, role, layout, state, flight, spark, kv, waiting, backlog, hit, ttft, tpot, silent, act } = row;
  row.node = make("tr", {}, name, role, layout, state, flight, spark, kv, waiting, backlog, hit, ttft, tpot, silent, act);
  return row;
}

// What is wrong with it, and for how long.
function trouble(endpoint) {
  const since = endpoint.since_s === null ? "" : span(endpoint.since_s);
  if (isOut(endpoint)) return [since, endpoint.slow || (endpoint.cause && words(endpoint.cause))];
  if (endpoint.severity === IMPAIRED) return [endpoint.slow || (endpoint.silence_s > 2 ? "silent" : "slow")];
  return endpoint.severity ? [since] : [];
}

function fillRow(row, endpoint, pools) {
  const how = grade(endpoint);
  row.node.className = how ? `s-${how}` : "";
  text(row.name, pools > 1 ? `${endpoint.name} (${endpoint.pool})` : endpoint.name);
  row.name.title = endpoint.url;
  text(row.role, endpoint.role);
  text(row.layout, endpoint.layout);
  text(row.said, endpoint.state);
  text(row.more, trouble(endpoint).filter(Boolean).map((part, at) => `${at ? ", " : " "}${part}`).join(""));
  row.flightGauge.set(endpoint.in_flight / endpoint.max_concurrency, endpoint.in_flight >= endpoint.max_concurrency ? "warn" : "");
  text(row.flightText, `${endpoint.in_flight} / ${endpoint.max_concurrency}`);
  row.kvGauge.set(endpoint.kv || 0, endpoint.kv > 0.95 ? "bad" : endpoint.kv > 0.85 ? "warn" : "");
  text(row.kvText, percent(endpoint.kv));
  text(row.waiting, endpoint.waiting === null ? NONE : `${endpoint.waiting} req`);
  text(row.backlog, endpoint.backlog_tokens ? `${whole(endpoint.backlog_tokens)} tok` : NONE);
  text(row.hit, percent(endpoint.hit));
  text(row.ttft, time(endpoint.ttft_p95_s));
  text(row.tpot, time(endpoint.tpot_p95_s));
  text(row.silent, endpoint.silence_s > 0.5 ? `${endpoint.silence_s.toFixed(1)} s` : NONE);
  row.values = endpoint.spark;
  row.line.set(endpoint.spark);
  text(row.most, `max ${Math.max(0, ...endpoint.spark)}`);
  const drained = endpoint.state === "draining" || endpoint.state === "drained";
  text(row.button, drained ? "Bring back" : "Drain");
  row.button.hidden = !operating || endpoint.state === "leaving";
  row.button.setAttribute("aria-label", `${row.button.textContent} ${endpoint.name}`);
}

// An endpoint that leaves may have the name of one that has come.
const keyOf = (endpoint) => JSON.stringify([endpoint.pool, endpoint.url, endpoint.name]);

// Rows do not move under a pointer that may be about to press Drain: new ones come last until it has left.
function inOrder(shown) {
  const sorted = [...shown].sort(compare);
  if (!operating || !pointed) return sorted;
  const places = new Map([...$("rows").children].map((node, place) => [node, place]));
  const place = (endpoint) => places.get(rows.get(keyOf(endpoint))?.node) ?? Infinity;
  return sorted.sort((one, other) => (place(one) === place(other) ? 0 : place(one) - place(other)));
}

export function drawFleet(frame) {
  const all = frame.endpoints;
  const wanted = $("filter").value.trim().toLowerCase();
  const shown = all.filter(({ name, pool, role, state, layout }) => `${name} ${pool} ${role} ${state} ${layout}`.toLowerCase().includes(wanted));
  const pools = new Set(all.map((endpoint) => endpoint.pool)).size;
  text($("fleet-note"), wanted ? `${shown.length} of ${count(all.length, "group")}` : count(all.length, "group"));
  map(shown);
  const sorted = inOrder(shown);
  for (const endpoint of sorted) {
    if (!rows.has(keyOf(endpoint))) rows.set(keyOf(endpoint), createRow(endpoint));
    fillRow(rows.get(keyOf(endpoint)), endpoint, pools);
  }
  arrange($("rows"), sorted.map((endpoint) => rows.get(keyOf(endpoint)).node));
  const current = new Set(all.map(keyOf));
  for (const key of rows.keys()) if (!current.has(key)) rows.delete(key);
}

// `redrawNow` draws the newest frame, `drain` drains the group of this name or brings it back.
export function startFleet(redrawNow, drain) {
  $("filter").value = setting("filter");
  $("filter").addEventListener("input", () => {
    setSetting("filter", $("filter").value.trim());
    redrawNow();
  });
  for (const button of document.querySelectorAll("#fleet th[data-sort] button")) {
    button.addEventListener("click", () => {
      sortBy(button.closest("th").dataset.sort);
      redrawNow();
    });
  }
  $("rows").addEventListener("pointerenter", () => { pointed = true; });
  $("rows").addEventListener("pointerleave", () => { pointed = false; });
  $("rows").addEventListener("drain", (event) => drain(event.detail));
  markHeadings();
}

export function setOperating(value) {
  operating = value;
}
