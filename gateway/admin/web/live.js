// The live page: what /live/stream says, drawn. Nothing is kept but the newest frame.

import { drawCharts, startCharts } from "./charts.js";
import { $, count, gauge, make, percent, rate, redraw, span, text, time, whole, words } from "./dom.js";
import { drawFleet, isOut, setOperating, startFleet } from "./fleet.js";
import { drawFlow } from "./flow.js";
import { startRequests } from "./requests.js";

const STALE_MS = 3000;
const MISSED = { ttft_missed: "late first token", tpot_missed: "slow tokens", both_missed: "both late", failed: "failed", shed: "refused" };

let frame = null;
let heardAt = 0;
let operating = false;
let key = "";

// Header

function summary() {
  const up = frame.endpoints.filter((endpoint) => endpoint.available).length;
  const out = frame.endpoints.filter(isOut).length;
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
  const timed = (name, { budget_s: budget, ...values }, share) => {
    const value = values[`${share}_s`];
    return [`${name} ${share}`, time(value), "", `budget ${time(budget)}`, over(value, budget)];
  };
  const tiles = [
    ["Requests", rate(all.requests_per_s), "req/s", "", ""],
    ["Output", whole(all.tokens_per_s), "tok/s", "", ""],
    ["In flight", whole(all.streams), "req", `${all.waiting} waiting`, all.waiting ? "warn" : ""],
    ["SLO met", percent(good), "", ended ? `of ${count(ended, "request")}` : "", good === null ? "" : good < 0.95 ? "bad" : good < 0.99 ? "warn" : ""],
    timed("TTFT", all.ttft, "p50"),
    timed("TTFT", all.ttft, "p95"),
    timed("TTFT", all.ttft, "p99"),
    timed("TPOT", all.tpot, "p95"),
    ["Prefix hits", percent(all.prefix_hit), "", all.engine_hit === null ? "" : `engines: ${percent(all.engine_hit)}`, ""],
    ["Refused", rate(shed), "req/s", "", shed ? "warn" : ""],
    ["Failed", rate(all.errors_per_s), "req/s", "", all.errors_per_s ? "bad" : ""],
  ];
  redraw("totals", tiles, () =>
    tiles.map(([name, value, unit, note, how]) =>
      make("div", { class: how }, make("dt", {}, name), make("dd", {}, value, unit ? make("span", { class: "unit" }, ` ${unit}`) : "", make("small", {}, note)))));
}

// The small panels

function bar(title, value, share, note, how) {
  const made = gauge();
  made.set(share, how);
  return make("div", {}, make("p", {}, make("span", {}, title), make("b", {}, value)), made.node, make("small", {}, note));
}

function why() {
  const lines = frame.why.map((reason) => make("li", { class: reason.grade }, reason.text));
  return lines.length ? lines : [make("li", {}, "Nothing to explain: all is well.")];
}

function slo() {
  const classes = frame.totals.goodput;
  if (!classes.length) return [make("p", { class: "empty" }, "No request has ended in the last minute.")];
  return [make("div", { class: "bars" }, ...classes.map((each) => {
    const missed = Object.entries(each.outcomes).filter(([name]) => name !== "met").map(([name, number]) => `${number} ${MISSED[name] || words(name)}`);
    const budgets = each.ttft_s === null ? "" : `TTFT ${time(each.ttft_s)}, TPOT ${time(each.tpot_s)}`;
    return bar(each.class, percent(each.ratio), each.ratio || 0, [budgets, ...missed].filter(Boolean).join(" · "), each.ratio < 0.95 ? "bad" : each.ratio < 0.99 ? "warn" : "");
  }))];
}

function pools() {
  const sheds = Object.entries(frame.totals.shed_per_s);
  const places = (pool) => frame.endpoints.filter((each) => each.pool === pool && each.role !== "prefill" && each.available).reduce((sum, each) => sum + each.max_concurrency, 0);
  const note = (pool) => [pool.policy, `${pool.waiting} waiting`, pool.price && `price ${pool.price.toFixed(2)} times a request's worth`, ...pool.models].filter(Boolean).join(", ");
  return [make("div", { class: "bars" },
    ...frame.pools.map((pool) => bar(pool.name, `${pool.in_flight} of ${count(places(pool.name), "place")}`, pool.in_flight / Math.max(1, places(pool.name)), note(pool), pool.waiting ? "warn" : "")),
    ...sheds.map(([reason, perS]) => bar(`refused: ${words(reason)}`, `${rate(perS)} req/s`, perS / Math.max(frame.totals.requests_per_s, perS), "", "bad")),
    sheds.length ? "" : make("p", { class: "empty" }, "No request was refused in the last 10 s."),
  )];
}

function costs() {
  const rows = frame.costs;
  const all = rows.reduce((sum, row) => sum + row.usd_per_hour, 0);
  const usd = (value) => `$${value < 10 ? value.toFixed(2) : Math.round(value).toLocaleString()}`;
  const title = (row) => (row.kind === "idle" ? `idle: pool ${row.name}` : row.name || "all tenants");
  return [make("div", { class: "bars" }, ...rows.map((row) =>
    bar(title(row), `${usd(row.usd_per_hour)}/h`, all ? row.usd_per_hour / all : 0, `${usd(row.usd)} since the start`, row.kind === "idle" ? "warn" : "")))];
}

function versions() {
  const { rejected, needs_restart: restart, versions: list } = frame.config;
  const date = (at) => new Date(at).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
  const shown = list.map((each, at) => make("li", {}, make("b", {}, `v${each.version}`), at ? "" : " in force",
    make("small", {}, `${date(each.at)}, by ${words(each.source)}${each.changes.length ? `: ${each.changes.join("; ")}` : ""}`)));
  if (restart.length) shown.unshift(make("li", { class: "rejected" }, `Needs a restart: ${restart.join(", ")}`));
  if (rejected) shown.unshift(make("li", { class: "rejected" }, "Rejected", ...rejected.map((problem) => make("small", {}, problem))));
  return shown;
}

function panels() {
  redraw("why", frame.why, why);
  redraw("slo", frame.totals.goodput, slo);
  redraw("pools", [frame.pools, frame.totals.shed_per_s, frame.endpoints.map((each) => each.available)], pools);
  $("cost-panel").hidden = !frame.costs.length;
  redraw("costs", frame.costs, costs);
  redraw("versions", [frame.config.versions, frame.config.rejected, frame.config.needs_restart], versions);
}

// Changing something

function toast(sentence) {
  text($("toast"), sentence);
  $("toast").hidden = false;
  setTimeout(() => { $("toast").hidden = true; }, 6000);
}

async function drain(name) {
  const endpoint = frame.endpoints.find((each) => each.name === name && each.state !== "leaving");
  const back = endpoint && (endpoint.state === "draining" || endpoint.state === "drained");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const answer = await fetch(`endpoints/${encodeURIComponent(name)}/${back ? "undrain" : "drain"}`, { method: "POST", headers });
    const body = await answer.json();
    toast(answer.ok ? (back ? `${name} is asked again.` : `${name} gets nothing new; ${body.in_flight} requests finish there.`) : body.message);
  } catch (error) {
    toast(`The gateway did not answer: ${error.message}`);
  }
}

function operate(value, shownKey = "") {
  operating = value;
  key = shownKey;
  setOperating(value);
  text($("operate"), value ? "Only look" : "Operate");
  if (frame) drawFleet(frame);
}

$("operate").addEventListener("click", () => {
  if (operating) {
    operate(false);
    return;
  }
  $("key").value = "";
  $("dialog").returnValue = "";
  $("dialog").showModal();
});
$("dialog").addEventListener("close", () => {
  const agreed = $("dialog").returnValue === "on";
  operate(agreed, agreed ? $("key").value : "");
  $("key").value = "";
});
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
  drawCharts(frame);
  drawFleet(frame);
  drawFlow(frame.flow);
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
startCharts();
startFleet(() => frame && drawFleet(frame), drain);
startRequests();
listen();
