// KV flow: handoffs from prefill to decode groups, as lines and as a table. Rates are of the last ten seconds.

import { $, NONE, count, draw, make, rate, redraw, text, time, volume, whole } from "./dom.js";

export function drawFlow({ pairs, under_way: underWay, kv_bytes_per_s: bytes }) {
  $("flow-panel").hidden = !pairs.length;
  if (!pairs.length) return;
  const total = pairs.reduce((sum, pair) => sum + pair.per_s, 0);
  const carried = Object.entries(bytes).map(([transport, perS]) => `, ${volume(perS)}/s by ${transport}`);
  text($("flow-note"), `${rate(total)} handoffs/s, ${underWay} under way${carried.join("")}`);
  const from = [...new Set(pairs.map((pair) => pair.prefill))];
  const to = [...new Set(pairs.map((pair) => pair.decode))];
  redraw("flow", pairs, () => streams(pairs, from, to));
  redraw("matrix", pairs, () => matrix(pairs, from, to));
}

function said(pair) {
  const moved = pair.kv_bytes_per_s === null ? "" : `, ${volume(pair.kv_bytes_per_s)}/s of KV`;
  const lost = pair.failed_per_s ? `, ${rate(pair.failed_per_s)} failed/s` : "";
  return `${pair.prefill} to ${pair.decode}, last 10 s: ${rate(pair.per_s)} handoffs/s${moved}, p95 ${time(pair.p95_s)}${lost}`;
}

function streams(pairs, from, to) {
  const height = Math.max(from.length, to.length) * 34 + 10;
  const place = (list, name) => ((list.indexOf(name) + 0.5) * height) / list.length;
  const most = Math.max(...pairs.map((pair) => pair.per_s), 0.1);
  $("flow").setAttribute("viewBox", `0 0 400 ${height}`);
  const paths = pairs.map((pair) => {
    const [a, b] = [place(from, pair.prefill), place(to, pair.decode)];
    const width = pair.per_s ? 1 + (pair.per_s / most) * 9 : 0.6;
    const shape = { d: `M112,${a} C200,${a} 200,${b} 288,${b}`, "stroke-width": width.toFixed(1), class: pair.failed_per_s ? "bad" : "" };
    return draw("path", shape, draw("title", {}, said(pair)));
  });
  const left = from.map((name) => draw("text", { x: 102, y: place(from, name) + 4, "text-anchor": "end" }, name));
  const right = to.map((name) => draw("text", { x: 298, y: place(to, name) + 4 }, name));
  const dots = [...from.map((name) => [112, place(from, name)]), ...to.map((name) => [288, place(to, name)])];
  return [...paths, ...dots.map(([cx, cy]) => draw("circle", { cx, cy, r: 3.2 })), ...left, ...right];
}

function matrix(pairs, from, to) {
  const at = (prefill, decode) => pairs.find((pair) => pair.prefill === prefill && pair.decode === decode);
  const busiest = Math.max(...pairs.map((pair) => pair.per_s));
  const cell = (pair) => {
    if (!pair) return make("td", { class: "dim" }, NONE);
    const lost = pair.failed ? make("small", { class: "bad" }, ` ${count(pair.failed, "failure")}`) : "";
    const over = pair.transport ? `, ${pair.transport}` : "";
    const moved = pair.kv_bytes_per_s === null ? "" : `${volume(pair.kv_bytes_per_s)}/s `;
    return make("td", { class: pair.per_s && pair.per_s === busiest ? "hot" : "" }, `${rate(pair.per_s)}/s `, moved, make("small", {}, `p95 ${time(pair.p95_s)}, ${whole(pair.served)} in all${over}`), lost);
  };
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "handoffs from \\ to"), ...to.map((name) => make("th", { scope: "col" }, name))));
  const lines = from.map((prefill) => make("tr", {}, make("th", { scope: "row" }, prefill), ...to.map((decode) => cell(at(prefill, decode)))));
  return [head, make("tbody", {}, ...lines)];
}
