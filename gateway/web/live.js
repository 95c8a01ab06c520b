// The live page: what /live/stream tells, drawn. Text is only ever set as text; nothing is kept but the last frame.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const STALE_MS = 3000;
const BAD = new Set(["dead", "ejected"]);
const WARN = new Set(["returning"]);
const OFF = new Set(["draining", "drained", "leaving"]);
const BROKEN = { ttft_missed: "late first token", tpot_missed: "slow tokens", both_missed: "both late", failed: "failed", shed: "refused" };

let frame = null;
let heardAt = 0;
let operating = false;
let key = "";
const rows = new Map();
const drawn = new Map();

function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function draw(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// Only what has changed is drawn anew, so that a selection or a screen reader is not disturbed twice a second.
function anew(id, value, build) {
  const said = JSON.stringify(value);
  if (drawn.get(id) === said) return;
  drawn.set(id, said);
  $(id).replaceChildren(...build());
}

const none = "–";
const percent = (share) => (share === null || share === undefined ? none : `${(share * 100).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`);
const whole = (number) => (number >= 10000 ? `${(number / 1000).toFixed(number >= 100000 ? 0 : 1)}k` : `${Math.round(number)}`);
const rate = (number) => (number >= 100 ? whole(number) : number.toFixed(1));

function volume(bytes) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1) * 1.0005) / 3)));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB"][power]}`;
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return none;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
}

function span(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const grade = (each) => (BAD.has(each.state) ? "bad" : WARN.has(each.state) || each.silence_s > 2 ? "warn" : OFF.has(each.state) ? "off" : "");

// Header

function summary() {
  const up = frame.endpoints.filter((each) => each.available).length;
  const out = frame.endpoints.filter((each) => BAD.has(each.state)).length;
  const config = `configuration v${frame.config.version}`;
  const groups = `${up} of ${frame.endpoints.length} groups serve`;
  const rest = frame.config.needs_restart.length ? ", needs a restart" : "";
  const node = $("summary");
  node.className = `summary ${frame.config.draining || up === 0 ? "bad" : out || frame.config.rejected ? "warn" : ""}`;
  text(node, frame.config.draining ? "Draining: takes nothing new" : `${groups}, ${config}${rest}`);
  document.title = out ? `(${out} out) Penstock` : "Penstock";
}

function totals() {
  const all = frame.totals;
  const outcomes = all.goodput.map((each) => each.outcomes);
  const met = outcomes.reduce((sum, each) => sum + (each.met || 0), 0);
  const ended = outcomes.reduce((sum, each) => sum + Object.values(each).reduce((a, b) => a + b, 0), 0);
  const good = ended ? met / ended : null;
  const shed = Object.values(all.shed_per_s).reduce((a, b) => a + b, 0);
  const over = (value, budget) => (value !== null && value > budget ? "bad" : "");
  const tiles = [
    ["Requests/s", rate(all.requests_per_s), "", ""],
    ["Output tokens/s", whole(all.tokens_per_s), "", ""],
    ["In flight", whole(all.streams), `${all.waiting} waiting`, all.waiting ? "warn" : ""],
    ["Promises kept", percent(good), ended ? `of ${whole(ended)}` : "", good === null ? "" : good < 0.95 ? "bad" : good < 0.99 ? "warn" : ""],
    ["TTFT p50", time(all.ttft.p50_s), all.ttft.count ? `of ${whole(all.ttft.count)}` : "", over(all.ttft.p50_s, all.ttft.budget_s)],
    ["TTFT p95", time(all.ttft.p95_s), `of ${time(all.ttft.budget_s)}`, over(all.ttft.p95_s, all.ttft.budget_s)],
    ["TTFT p99", time(all.ttft.p99_s), `of ${time(all.ttft.budget_s)}`, over(all.ttft.p99_s, all.ttft.budget_s)],
    ["TPOT p95", time(all.tpot.p95_s), `of ${time(all.tpot.budget_s)}`, over(all.tpot.p95_s, all.tpot.budget_s)],
    ["Prefix hits", percent(all.prefix_hit), all.engine_hit === null ? "" : `engines: ${percent(all.engine_hit)}`, ""],
    ["Refused/s", rate(shed), "", shed ? "warn" : ""],
    ["Failed/s", rate(all.errors_per_s), "", all.errors_per_s ? "bad" : ""],
  ];
  anew("totals", tiles, () =>
    tiles.map(([name, value, note, how]) =>
      make("div", { class: how }, make("dt", {}, name), make("dd", {}, value, make("small", {}, note))),
    ),
  );
}

// Charts

const charts = {};

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function chart(id, series) {
  const host = $(id);
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const options = {
    width: host.clientWidth, height: host.clientHeight, cursor: { show: false }, legend: { show: false }, padding: [6, 18, 0, 0],
    scales: { x: { time: false, range: () => [-60, 0] }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.15 : 1] } },
    axes: [
      { ...axis, size: 24, values: (_, ticks) => ticks.map((at) => (at ? `${at} s` : "now")) },
      { ...axis, size: 46, values: (_, ticks) => ticks.map((value) => `${Number(value.toPrecision(3))}`) },
    ],
    series: [{}, ...series],
  };
  charts[id] = new uPlot(options, [[], ...series.map(() => [])], host);
}

function buildCharts() {
  for (const [id, each] of Object.entries(charts)) {
    each.destroy();
    delete charts[id];
  }
  const line = (name, colour, more = {}) => ({ label: name, stroke: css(colour), width: 1.8, points: { show: false }, ...more });
  chart("chart-traffic", [line("requests", "--flow", { fill: `${css("--flow")}22` }), line("refused", "--warn"), line("failed", "--bad")]);
  chart("chart-ttft", [line("p95", "--second", { fill: `${css("--second")}1e`, spanGaps: true, points: { show: true, size: 4, fill: css("--second") } }), line("budget", "--bad", { dash: [5, 5], width: 1 })]);
  drawCharts();
}

function drawCharts() {
  if (!frame || !charts["chart-traffic"]) return;
  const past = frame.history;
  const budget = frame.totals.ttft.budget_s;
  const most = Math.max(...past.ttft_p95_s.map((value) => value || 0), 0);
  charts["chart-traffic"].setData([past.ago_s, past.requests_per_s, past.shed_per_s, past.errors_per_s]);
  // A budget far above everything measured would flatten the line: it is drawn once something comes near.
  charts["chart-ttft"].setData([past.ago_s, past.ttft_p95_s, past.ago_s.map(() => (most * 3 > budget ? budget : null))]);
}

// Fleet

const cells = (layout) => {
  const size = (name) => Number((layout.match(new RegExp(`\\b${name}(\\d+)`)) || [0, 1])[1]);
  return [Math.min(size("tp"), 16), Math.min(size("pp") * size("dp"), 8)];
};

function tile(each) {
  const [across, down] = cells(each.layout);
  const lit = Math.ceil((each.kv || 0) * across * down);
  const squares = make("span", { class: "gpus", "aria-hidden": "true" });
  squares.style.gridTemplateColumns = `repeat(${across}, 10px)`;
  for (let at = 0; at < across * down; at += 1) squares.append(make("i", { class: at < lit ? "on" : "" }));
  const says = BAD.has(each.state) || OFF.has(each.state) ? each.state : `${each.in_flight} in flight`;
  return make("div", { class: `tile ${grade(each)}`, title: `${each.name}: ${each.layout}, ${each.url}` }, make("b", {}, each.name), squares, make("span", { class: "n" }, says));
}

function map(shown) {
  const groups = new Map();
  for (const each of shown) {
    const title = each.role === "both" ? each.pool : `${each.pool}, ${each.role}`;
    groups.set(title, [...(groups.get(title) || []), each]);
  }
  const plain = [...groups].map(([title, list]) => [title, list.map((each) => [each.name, each.state, each.in_flight, each.kv && each.kv.toFixed(2), each.layout, grade(each)])]);
  anew("map", plain, () => [...groups].map(([title, list]) => make("div", {}, make("h3", {}, title), make("div", { class: "tiles" }, ...list.map(tile)))));
}

function gauge() {
  const fill = make("i");
  return { node: make("span", { class: "gauge" }, fill), set(share, how = "") {
    fill.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
    fill.parentNode.className = `gauge ${how}`;
  } };
}

function row(each) {
  const cell = (name = "") => make("td", { class: name });
  const made = {
    name: make("th", { scope: "row" }), role: cell(), layout: cell("dim"), state: cell("state"), flight: cell(), spark: cell("spark"), kv: cell(),
    waiting: cell("num"), backlog: cell("num"), hit: cell("num"), ttft: cell("num"), tpot: cell("num"), silent: cell("num"), act: cell("act"),
    flightGauge: gauge(), kvGauge: gauge(), flightText: make("span"), kvText: make("span"), said: make("span"), since: make("small"),
    line: draw("polyline"), area: draw("polygon"), button: make("button", { type: "button" }),
  };
  made.flight.append(made.flightGauge.node, made.flightText);
  made.kv.append(made.kvGauge.node, made.kvText);
  made.state.append(made.said, made.since);
  made.spark.append(draw("svg", { class: "line", viewBox: "0 0 120 22", preserveAspectRatio: "none", "aria-hidden": "true" }, made.area, made.line));
  made.button.addEventListener("click", () => drain(each.name));
  made.act.append(made.button);
  const { name, role, layout, state, flight, spark, kv, waiting, backlog, hit, ttft, tpot, silent, act } = made;
  made.node = make("tr", {}, name, role, layout, state, flight, spark, kv, waiting, backlog, hit, ttft, tpot, silent, act);
  return made;
}

function fill(made, each) {
  const how = grade(each);
  made.node.className = how ? `s-${how}` : "";
  text(made.name, each.name);
  text(made.role, each.role);
  text(made.layout, each.layout);
  text(made.said, each.state);
  text(made.since, (how || each.cause) && each.since_s !== null ? ` ${span(each.since_s)}${BAD.has(each.state) && each.cause ? `, ${each.cause.replaceAll("_", " ")}` : ""}` : "");
  made.flightGauge.set(each.in_flight / each.max_concurrency, each.in_flight >= each.max_concurrency ? "warn" : "");
  text(made.flightText, `${each.in_flight}/${each.max_concurrency}`);
  made.kvGauge.set(each.kv || 0, each.kv > 0.95 ? "bad" : each.kv > 0.85 ? "warn" : "");
  text(made.kvText, percent(each.kv));
  text(made.waiting, each.waiting === null ? none : `${each.waiting}`);
  text(made.backlog, each.backlog_tokens ? `${whole(each.backlog_tokens)} tok` : none);
  text(made.hit, percent(each.hit));
  text(made.ttft, time(each.ttft_p95_s));
  text(made.tpot, time(each.tpot_p95_s));
  text(made.silent, each.silence_s > 0.5 ? `${each.silence_s.toFixed(1)} s` : none);
  const most = Math.max(4, ...each.spark);
  const points = each.spark.map((value, at) => `${(at * 120) / (each.spark.length - 1)},${(21 - (value / most) * 20).toFixed(1)}`).join(" ");
  made.line.setAttribute("points", points);
  made.area.setAttribute("points", `0,22 ${points} 120,22`);
  const drained = each.state === "draining" || each.state === "drained";
  text(made.button, drained ? "Bring back" : "Drain");
  made.button.hidden = !operating || each.state === "leaving";
  made.button.setAttribute("aria-label", `${made.button.textContent} ${each.name}`);
}

// One who leaves may have the name of one who came.
function keyOf(each) {
  return JSON.stringify([each.pool, each.url, each.name]);
}

function fleet() {
  const wanted = $("filter").value.trim().toLowerCase();
  const shown = frame.endpoints.filter((each) => `${each.name} ${each.pool} ${each.role} ${each.state} ${each.layout}`.toLowerCase().includes(wanted));
  text($("fleet-note"), wanted ? `${shown.length} of ${frame.endpoints.length} groups` : `${frame.endpoints.length} groups`);
  map(shown);
  for (const each of shown) {
    if (!rows.has(keyOf(each))) rows.set(keyOf(each), row(each));
    fill(rows.get(keyOf(each)), each);
  }
  const order = shown.map((each) => rows.get(keyOf(each)).node);
  const now = [...$("rows").children];
  if (order.length !== now.length || order.some((node, at) => node !== now[at])) $("rows").replaceChildren(...order);
  const known = new Set(frame.endpoints.map(keyOf));
  for (const key of rows.keys()) if (!known.has(key)) rows.delete(key);
}

// KV flow

function flow() {
  const { pairs, under_way } = frame.flow;
  $("flow-panel").hidden = !pairs.length;
  if (!pairs.length) return;
  const total = pairs.reduce((sum, each) => sum + each.per_s, 0);
  const carried = Object.entries(frame.flow.kv_bytes_per_s).map(([transport, perS]) => `, ${volume(perS)}/s by ${transport}`);
  text($("flow-note"), `${rate(total)} handoffs/s, ${under_way} under way${carried.join("")}`);
  const from = [...new Set(pairs.map((each) => each.prefill))];
  const to = [...new Set(pairs.map((each) => each.decode))];
  anew("flow", pairs, () => streams(pairs, from, to));
  anew("matrix", pairs, () => matrix(pairs, from, to));
}

function streams(pairs, from, to) {
  const height = Math.max(from.length, to.length) * 34 + 10;
  const place = (list, name) => ((list.indexOf(name) + 0.5) * height) / list.length;
  const most = Math.max(...pairs.map((each) => each.per_s), 0.1);
  $("flow").setAttribute("viewBox", `0 0 400 ${height}`);
  const paths = pairs.map((each) => {
    const [a, b] = [place(from, each.prefill), place(to, each.decode)];
    const width = each.per_s ? 1 + (each.per_s / most) * 9 : 0.6;
    return draw("path", { d: `M112,${a} C200,${a} 200,${b} 288,${b}`, "stroke-width": width.toFixed(1), class: each.failed_per_s ? "bad" : "" });
  });
  const left = from.map((name) => draw("text", { x: 102, y: place(from, name) + 4, "text-anchor": "end" }, name));
  const right = to.map((name) => draw("text", { x: 298, y: place(to, name) + 4 }, name));
  const dots = [...from.map((name) => [112, place(from, name)]), ...to.map((name) => [288, place(to, name)])];
  return [...paths, ...dots.map(([cx, cy]) => draw("circle", { cx, cy, r: 3.2 })), ...left, ...right];
}

function matrix(pairs, from, to) {
  const at = (prefill, decode) => pairs.find((each) => each.prefill === prefill && each.decode === decode);
  const busiest = Math.max(...pairs.map((each) => each.per_s));
  const cell = (each) => {
    if (!each) return make("td", { class: "dim" }, none);
    const lost = each.failed ? make("small", { class: "bad" }, ` ${each.failed} failed`) : "";
    const over = each.transport ? `, ${each.transport}` : "";
    const moved = each.kv_bytes_per_s === null ? "" : `${volume(each.kv_bytes_per_s)}/s `;
    return make("td", { class: each.per_s && each.per_s === busiest ? "hot" : "" }, `${rate(each.per_s)}/s `, moved, make("small", {}, `p95 ${time(each.p95_s)}, ${whole(each.served)} in all${over}`), lost);
  };
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "from \\ to"), ...to.map((name) => make("th", { scope: "col" }, name))));
  const lines = from.map((prefill) => make("tr", {}, make("th", { scope: "row" }, prefill), ...to.map((decode) => cell(at(prefill, decode)))));
  return [head, make("tbody", {}, ...lines)];
}

// The three small panels

function bar(title, value, share, note, how) {
  const drawn = gauge();
  drawn.set(share, how);
  return make("div", {}, make("p", {}, make("span", {}, title), make("b", {}, value)), drawn.node, make("small", {}, note));
}

function panels() {
  anew("why", frame.why, () => (frame.why.length ? frame.why.map((each) => make("li", { class: each.grade }, each.text)) : [make("li", {}, "Nothing to explain: all is well.")]));
  anew("slo", frame.totals.goodput, () => {
    if (!frame.totals.goodput.length) return [make("p", { class: "empty" }, "No request has ended in the last minute.")];
    return [make("div", { class: "bars" }, ...frame.totals.goodput.map((each) => {
      const missed = Object.entries(each.outcomes).filter(([kept]) => kept !== "met").map(([kept, count]) => `${count} ${BROKEN[kept] || kept}`);
      const promise = each.ttft_s === null ? "" : `TTFT ${time(each.ttft_s)}, TPOT ${time(each.tpot_s)}`;
      return bar(each.class, percent(each.ratio), each.ratio || 0, [promise, ...missed].filter(Boolean).join(" · "), each.ratio < 0.95 ? "bad" : each.ratio < 0.99 ? "warn" : "");
    }))];
  });
  const sheds = frame.totals.shed_per_s;
  anew("pools", [frame.pools, sheds], () => [make("div", { class: "bars" },
    ...frame.pools.map((pool) => bar(pool.name, `${pool.in_flight} in flight`, pool.in_flight / Math.max(1, room(pool.name)), `${pool.policy}, ${pool.waiting} waiting${pool.price ? `, price ${pool.price.toFixed(2)}` : ""}${pool.models.length ? `, ${pool.models.join(", ")}` : ""}`, pool.waiting ? "warn" : "")),
    ...Object.entries(sheds).map(([reason, perS]) => bar(`refused: ${reason.replaceAll("_", " ")}`, `${rate(perS)}/s`, perS / Math.max(frame.totals.requests_per_s, perS), "", "bad")),
    Object.keys(sheds).length ? "" : make("p", { class: "empty" }, "Nobody is refused."),
  )]);
  anew("versions", [frame.config.versions, frame.config.rejected, frame.config.needs_restart], versions);
}

const room = (pool) => frame.endpoints.filter((each) => each.pool === pool && each.role !== "prefill" && each.available).reduce((sum, each) => sum + each.max_concurrency, 0);

function versions() {
  const { rejected, needs_restart: restart, versions: list } = frame.config;
  const clock = (at) => new Date(at).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
  const shown = list.map((each, at) => make("li", {}, make("b", {}, `v${each.version}`), at ? "" : " in force",
    make("small", {}, `${clock(each.at)}, by ${each.source.replaceAll("_", " ")}${each.changes.length ? `: ${each.changes.join("; ")}` : ""}`)));
  if (restart.length) shown.unshift(make("li", { class: "rejected" }, `Needs a restart: ${restart.join(", ")}`));
  if (rejected) shown.unshift(make("li", { class: "rejected" }, "Rejected", ...rejected.map((problem) => make("small", {}, problem))));
  return shown;
}

// Changing something

function toast(words) {
  text($("toast"), words);
  $("toast").hidden = false;
  setTimeout(() => { $("toast").hidden = true; }, 6000);
}

async function drain(name) {
  const each = frame.endpoints.find((one) => one.name === name && one.state !== "leaving");
  const back = each && (each.state === "draining" || each.state === "drained");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const answer = await fetch(`endpoints/${encodeURIComponent(name)}/${back ? "undrain" : "drain"}`, { method: "POST", headers });
    const told = await answer.json();
    toast(answer.ok ? (back ? `${name} is asked again.` : `${name} gets nothing new; ${told.in_flight} requests finish there.`) : told.message);
  } catch (error) {
    toast(`The gateway did not answer: ${error.message}`);
  }
}

function operate() {
  if (operating) {
    operating = false;
    key = "";
    text($("operate"), "Operate");
    if (frame) fleet();
  } else {
    $("key").value = "";
    $("dialog").returnValue = "";
    $("dialog").showModal();
  }
}

$("operate").addEventListener("click", operate);
$("dialog").addEventListener("close", () => {
  operating = $("dialog").returnValue === "on";
  key = operating ? $("key").value : "";
  $("key").value = "";
  text($("operate"), operating ? "Only look" : "Operate");
  if (frame) fleet();
});
$("filter").addEventListener("input", () => frame && fleet());
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target === document.body) {
    event.preventDefault();
    $("filter").focus();
  }
});

// The stream

function show() {
  summary();
  totals();
  drawCharts();
  fleet();
  flow();
  panels();
}

function listen() {
  const source = new EventSource("live/stream");
  source.onmessage = (event) => {
    frame = JSON.parse(event.data);
    heardAt = performance.now();
    show();
  };
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000); // refused: too many watch, or not ready yet
  };
}

setInterval(() => {
  if (!heardAt || performance.now() - heardAt < STALE_MS) return;
  $("summary").className = "summary stale";
  text($("summary"), `No word from the gateway for ${span((performance.now() - heardAt) / 1000)}: what you see is old`);
}, 500);
new ResizeObserver(() => {
  for (const [id, each] of Object.entries(charts)) each.setSize({ width: $(id).clientWidth, height: $(id).clientHeight });
}).observe($("chart-traffic"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", buildCharts);
buildCharts();
listen();
