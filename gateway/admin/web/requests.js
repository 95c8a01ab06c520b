// Recent requests: the newest that are over, and why one of them went where it went. Only ids, names and numbers come
// from the gateway: it lists no prompt and no answer.

import { $, NONE, arrange, clock, count, make, setSetting, setting, text, time, whole, words } from "./dom.js";

const EVERY_MS = 2000;
const LIMIT = 50;
const MOST_CANDIDATES = 16;
const LATE = { ttft_missed: "late first token", tpot_missed: "slow tokens", both_missed: "late and slow" };

const rows = new Map(); // by id; a request that is over never changes

// The list

function outcome(request) {
  if (request.outcome === "served") return LATE[request.slo_outcome] || "served";
  return request.reason ? `${words(request.outcome)}: ${words(request.reason)}` : words(request.outcome);
}

function createRow(request) {
  const id = make("button", { type: "button", class: "id" }, request.id);
  id.setAttribute("aria-haspopup", "dialog");
  const began = make("time", { dateTime: new Date(request.at * 1000).toISOString(), title: new Date(request.at * 1000).toISOString() }, clock(request.at));
  const via = request.prefill ? `${request.prefill} → ` : "";
  const retried = request.retries.length ? make("small", {}, ` after ${request.retries.join(", ")}`) : "";
  const cached = request.cached_tokens ? make("small", {}, ` ${whole(request.cached_tokens)} cached`) : "";
  const how = request.problem ? (request.outcome === "served" || request.outcome === "client_gone" ? "warn" : "bad") : "";
  const node = make(
    "tr", { class: how && `s-${how}` },
    make("td", {}, began),
    make("td", { class: "long" }, request.model || NONE),
    make("td", { class: "long" }, request.endpoint ? `${via}${request.endpoint}` : NONE, retried),
    make("td", { class: "state" }, request.status ? `${request.status} ` : "", outcome(request)),
    make("td", { class: "num" }, time(request.ttft_s)),
    make("td", { class: "num" }, time(request.tpot_s)),
    make("td", { class: "num" }, time(request.took_s)),
    make("td", { class: "num" }, request.prompt_tokens === null ? NONE : `${whole(request.prompt_tokens)} tok`, cached),
    make("td", { class: "num" }, request.output_tokens === null ? NONE : `${whole(request.output_tokens)} tok`),
    make("td", {}, id, request.trace_id ? make("small", { class: "trace" }, `trace ${request.trace_id}`) : ""),
  );
  node.addEventListener("click", () => { if (!String(getSelection())) explain(request.id); });
  return node;
}

function draw(page) {
  const listed = page.requests;
  const only = $("problems").checked;
  text($("requests-note"), page.size ? `the newest ${listed.length} of up to ${page.size} that the gateway keeps` : "");
  for (const request of listed) if (!rows.has(request.id)) rows.set(request.id, createRow(request));
  const ids = new Set(listed.map((request) => request.id));
  for (const id of rows.keys()) if (!ids.has(id)) rows.delete(id);
  arrange($("requests"), listed.map((request) => rows.get(request.id)));
  $("requests-table").hidden = !listed.length;
  $("requests-empty").hidden = Boolean(listed.length);
  const nothing = only ? "No request that is kept had a problem." : "No request has ended yet.";
  text($("requests-empty"), page.size ? nothing : "The gateway keeps no requests: observability.explained is 0.");
}

async function refresh() {
  if (document.hidden || $("hold").checked) return;
  try {
    const answer = await fetch(`requests?limit=${LIMIT}&problems=${Number($("problems").checked)}`, { signal: AbortSignal.timeout(5000) });
    if (answer.ok && !$("hold").checked) draw(await answer.json());
  } catch {
    text($("requests-note"), "the gateway did not answer: what you see is old");
  }
}

// One request

async function explain(id) {
  let told = null;
  let problem = "";
  try {
    const answer = await fetch(`explain/${encodeURIComponent(id)}`, { signal: AbortSignal.timeout(5000) });
    const body = await answer.json();
    if (answer.ok) told = body;
    else problem = body.message || `The gateway answered ${answer.status}.`;
  } catch (error) {
    problem = `The gateway did not answer: ${error.message}`;
  }
  text($("h-explain"), id);
  $("explain-body").replaceChildren(...(told ? page(told) : [make("p", { class: "empty" }, problem)]));
  $("explain-json").href = `explain/${encodeURIComponent(id)}`;
  if (!$("explain").open) $("explain").showModal();
}

function page(told) {
  const facts = [
    ["Outcome", `${told.status} ${words(told.outcome)}${told.slo_outcome ? `, SLO: ${words(told.slo_outcome)}` : ""}`],
    ["Model", [told.model, told.tier && `served by ${told.tier}`].filter(Boolean).join(", ")],
    ["Tenant", told.tenant],
    ["Asked", told.slo && `${count(told.prompt_tokens, "prompt token")}, ${count(told.output_tokens, "output token")} expected`],
    ["SLO", told.slo && `${told.slo.name}: TTFT within ${time(told.slo.ttft_s)}, TPOT within ${time(told.slo.tpot_s)}`],
    ["Admission", admission(told.admission)],
    ["Picked", told.pick && picked(told.pick)],
    ["Pull", told.pull && (told.pull.tokens ? `${told.pull.tokens} tokens from ${told.pull.source}` : `nothing came from ${told.pull.source}`)],
    ["Split", told.split && !told.pull && (told.split.prefill ? `prefill by ${told.split.prefill}: ${words(told.split.reason)}` : `not split: ${words(told.split.reason)}`)],
    ["Retried", told.retries.length ? `after a failure of ${told.retries.join(", ")}` : ""],
    ["TTFT", measured(told.actual.ttft_s, told.predicted.ttft_s)],
    ["TPOT", measured(told.actual.tpot_s, told.predicted.tpot_s)],
    ["Trace", told.trace_id],
  ].filter(([, value]) => value);
  const list = make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  return told.pick ? [list, candidates(told.pick)] : [list];
}

function admission({ verdict, reason, detail, waited_s: waited }) {
  if (verdict === "admitted") return waited >= 0.001 ? `admitted after ${time(waited)}` : "admitted at once";
  return [`refused: ${words(reason || "")}`, detail].filter(Boolean).join(". ");
}

function picked(pick) {
  const next = pick.runner_up ? `; next best: ${pick.runner_up}` : "";
  return `${pick.endpoint} of ${count(pick.candidates.length, "candidate")} by ${pick.policy}${next}`;
}

function measured(actual, predicted) {
  if (actual === null) return "";
  return predicted === null ? time(actual) : `${time(actual)} (predicted at the pick: ${time(predicted)})`;
}

function candidates(pick) {
  const shown = pick.candidates.slice(0, MOST_CANDIDATES);
  const terms = [...new Set(shown.flatMap((each) => Object.keys(each.terms || {})))].sort();
  const number = (value) => (value === null || value === undefined ? NONE : `${Number(value.toPrecision(4))}`);
  const heads = ["Candidate", "Score", "Believed cached", ...terms.map(words)];
  const head = make("tr", {}, ...heads.map((name, at) => make("th", { scope: "col", class: at ? "num" : "" }, name)));
  const lines = shown.map((each) =>
    make(
      "tr", { class: each.endpoint === pick.endpoint ? "chosen" : "" },
      make("th", { scope: "row" }, each.endpoint),
      make("td", { class: "num" }, number(each.score)),
      make("td", { class: "num" }, each.cached_tokens === undefined ? NONE : `${whole(each.cached_tokens)} tok`),
      ...terms.map((name) => make("td", { class: "num" }, number(each.terms?.[name]))),
    ));
  const rest = pick.candidates.length - shown.length;
  const caption = `Candidates, best score first${rest ? `; ${rest} more in the JSON` : ""}. A score has no unit: it compares the candidates of one request.`;
  return make("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: "Candidates" }, make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...lines)));
}

export function startRequests() {
  $("problems").checked = setting("problems") === "1";
  $("problems").addEventListener("change", () => {
    setSetting("problems", $("problems").checked ? "1" : "");
    refresh();
  });
  $("hold").addEventListener("change", refresh);
  document.addEventListener("visibilitychange", refresh);
  setInterval(refresh, EVERY_MS);
  refresh();
}
