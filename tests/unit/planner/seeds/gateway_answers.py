"""Computes the statements of `penstock seeds` about configurations, policies and deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from ruamel.yaml import YAML

from gateway.cli.doctor.engine_probe import ProbeResponse, ProbeResult
from gateway.cli.doctor.findings import CheckFinding
from gateway.cli.doctor.production_checklist import CheckedEndpoint, CheckedFleet, run_checklist
from gateway.cli.doctor.seed_checklist import seed_findings
from gateway.cli.main import run as penstock
from gateway.config import Config, layout_rules, role_rules
from gateway.config.diff import diff
from gateway.config.loader import load_text
from gateway.fleet.endpoint_registry import EndpointRegistry
from gateway.fleet.engine_metrics import parse_scrape
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.transfer_plan import plan_transfer
from planner.seeds.collectives import collectives_share
from planner.seeds.statements import SeedItem
from policies import policy_registry
from policies.endpoint_load import EndpointLoad
from policies.filters import below_cap, fits_context
from policies.load_ledger import reserve
from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.prefix_index import PrefixIndex
from policies.pricing.model_tiers import ModelTier, alternatives
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, Endpoint, EngineKind
from policies.sizing.gpus import gpu_named
from policies.sizing.layout_facts import facts_of_name
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import PlannedGroup, layout_findings
from tests.command_runner import CommandRunner
from tests.replacement import stand_in
from tests.unit.planner.seeds.answers import Outcome, answer
from tests.unit.planner.seeds.sizing_answers import trtllm_of_the_seed
from tests.unit.policies.builders import ask, candidate, outlook
from tools.monitoring.files import RULES
from tools.monitoring.files import files as monitoring_files
from tools.monitoring.promql import find_selectors
from tools.monitoring.slos import BURNS, OBJECTIVES

ROOT = Path(__file__).parents[4]
METRICS = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="24837"} 1.0
"""

METRICS_OF_RANKS = b"""vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting{engine="1"} 11.0
vllm:kv_cache_usage_perc{engine="0"} 0.05
vllm:kv_cache_usage_perc{engine="1"} 0.99
"""


def file(*layouts: Mapping[str, int], model: str = "llama-3.1-70b", **more: Any) -> dict[str, Any]:
    endpoints = [
        {"url": f"http://127.0.0.1:{9000 + n}", "layout": dict(layout)} | more.get("spec", {})
        for n, layout in enumerate(layouts)
    ]
    top = {key: value for key, value in more.items() if key != "spec"}
    pools = {"main": {"endpoints": endpoints}}
    return {"version": 1, "models": [{"name": model, "pool": "main"}], "pools": pools} | top


def checked(data: Mapping[str, Any]) -> str:
    found = [*layout_rules.errors(data), *layout_rules.warnings(data)]
    return "\n".join(finding.message for finding in found) or "fine"


def group_rules(group: PlannedGroup) -> str:
    return "\n".join(finding.text for finding in layout_findings(group)) or "fine"


@answer(9)
def _(_item: SeedItem) -> Outcome:
    model = model_named("llama-3.1-70b")
    return {
        "finding": checked(file({"tp": 16}, hardware={"link_domain_gpus": 72})),
        "kv_tp16_over_tp8": model.kv_rank_bytes(16) / model.kv_rank_bytes(8),
    }


@answer(23)
def _(_item: SeedItem) -> Outcome:
    policy = policy_registry.build("least_loaded", {})
    busy, idle = candidate(0, prefill_tokens=5000, in_flight=3), candidate(1)
    choice = pick(policy, ask(), [busy, idle])
    assert choice is not None
    return {"picked": choice.candidate.endpoint.name}


def _domain(_item: SeedItem) -> Outcome:
    return {"finding": checked(file({"tp": 16}))}


for _number in (27, 103):
    answer(_number)(_domain)


@answer(43)
def _(_item: SeedItem) -> Outcome:
    prints = Fingerprinter(b"sixteen bytes at least")
    index = PrefixIndex(1 << 20)
    text = Random(1).randbytes(4 * prints.block_bytes)
    index.insert(prints.fingerprint(b"", text[: 3 * prints.block_bytes]), 1, 192)
    return {"tokens_known_to_the_index": index.match(prints.fingerprint(b"", text), 256)[1]}


@answer(48)
def _(_item: SeedItem) -> Outcome:
    data = file({"tp": 4}, {"tp": 8}, spec={"engine": "vllm"})
    first, second = data["pools"]["main"]["endpoints"]
    first["role"], second["role"] = "prefill", "decode"
    data["models"][0]["split"] = {}
    errors = list(role_rules.errors(data))
    data["pools"]["main"]["endpoints"] = [second | {"role": "prefill"}, first]
    alone = " ".join(finding.message for finding in role_rules.errors(data))
    return {"problems": len(errors), "prefill_alone": alone}


@answer(52)
def _(_item: SeedItem) -> Outcome:
    # tp0 has the prompt's prefix and more work than tp1.
    endpoints = [candidate(0, prefill_tokens=900, in_flight=1), candidate(1)]
    picked: dict[str, object] = {}
    for name in ("round_robin", "least_loaded", "prefix_aware"):
        policy = policy_registry.build(name, {})
        choices = [pick(policy, ask(4000, cached=(3900, 0)), endpoints) for _ in range(3)]
        picked[name] = " ".join(c.candidate.endpoint.name for c in choices if c is not None)
    return picked


@answer(53)
def _(_item: SeedItem) -> Outcome:
    # Helm is not installed here; tests/deploy renders the chart. The first signal must be served.
    text = (ROOT / "deploy/helm/penstock/templates/scaledobject.yaml").read_text()
    served = {spec.name for spec in Metrics().catalogue()}
    return {"signal": "".join(set(re.findall(r"sum\((penstock_\w+)", text)) & served)}


@answer(56)
def _(_item: SeedItem) -> Outcome:
    wanted = re.compile(r"gpu_util|gpu_usage|DCGM", re.IGNORECASE)
    read = [
        path
        for folder in ("gateway", "policies")
        for path in (ROOT / folder).rglob("*.py")
        if wanted.search(path.read_text().replace("gpu_utilization or", ""))
        and "memory-utilization" not in path.read_text()
    ]
    served = [spec.name for spec in Metrics().catalogue() if wanted.search(spec.name)]
    return {"gpu_utilisation_metrics": len(served) + len(read)}


@answer(67)
def _(_item: SeedItem) -> Outcome:
    group = PlannedGroup(Layout(8), facts_of_name("llama-3.1-8b"), min_tp=1)
    return {"finding": group_rules(group)}


@answer(71)
def _(_item: SeedItem) -> Outcome:
    return {"finding": checked(file({"tp": 7}))}


@answer(73)
def _(_item: SeedItem) -> Outcome:
    # Requests enter while the filter of every policy keeps the endpoint of the registry.
    config = Config.model_validate(file({"tp": 4}))
    (member,) = EndpointRegistry(stand_in(WriteQueue, None)).plan(config).members
    group, served = Candidate(member.endpoint, EndpointLoad(0)), 0
    while below_cap(ask(), [group]):
        served += 1
        reserve(group.load, ask().request, 0, 100.0)
    return {"requests_at_once": served}


@answer(75)
def _(_item: SeedItem) -> Outcome:
    tiers = [
        Candidate(Endpoint(f"g{place}", "", "main", "", context_tokens=tokens), EndpointLoad(place))
        for place, tokens in enumerate((8192, 32_768))
    ]
    kept = fits_context(ask(20_000, 500), tiers)
    return {"kept_for_20k_tokens": ", ".join(str(c.endpoint.context_tokens) for c in kept)}


@answer(76)
def _(_item: SeedItem) -> Outcome:
    # The small model takes a request in which its queue leaves time for the first token.
    config = Config.model_validate(two_sizes())
    small = config.models[0].overflow[0].model
    names = {}
    for outcome, queue_s in (("overflow", 0.5), ("overflow_behind_a_long_queue", 60.0)):
        tier = ModelTier(small, (outlook(0, prefill_done_at=100.0 + queue_s),))
        names[outcome] = ", ".join(found.name for found, _ in alternatives(ask(), [tier])) or "none"
    return names


def two_sizes() -> dict[str, Any]:
    large, small = file({"tp": 4}), file({"tp": 1}, model="llama-2-13b")
    small["pools"]["main"]["endpoints"][0]["url"] = "http://127.0.0.1:9100"
    models = [
        large["models"][0] | {"pool": "large", "overflow": [{"model": "llama-2-13b"}]},
        small["models"][0] | {"pool": "small"},
    ]
    pools = {"large": large["pools"]["main"], "small": small["pools"]["main"]}
    return large | {"models": models, "pools": pools}


@answer(78)
def _(_item: SeedItem) -> Outcome:
    return {"finding": checked(file({"tp": 4}, spec={"labels": {"gpu": "l40s"}}))}


@answer(81)
def _(_item: SeedItem) -> Outcome:
    data = file({"tp": 4}, {"tp": 8}, hardware={"domains": {"node-a": {"gpus": 8}}})
    for spec in data["pools"]["main"]["endpoints"]:
        spec["layout"]["domains"] = ["node-a"]
    return {"finding": checked(data)}


@answer(119)
def _(item: SeedItem) -> Outcome:
    preset = ROOT / item.command.removeprefix("penstock check ")
    data = YAML(typ="safe").load(preset)
    printed = CommandRunner().invoke(penstock, ["check", str(preset)]).output
    wrong: dict[str, str] = {}
    for name, sizes in {"pp_7": {"pp": 7}, "five_groups": {"dp": 10, "ep": 5}}.items():
        broken = json.loads(json.dumps(data))
        for spec in broken["pools"]["units"]["endpoints"]:
            spec["layout"] |= sizes
        wrong[name] = checked(broken)
    return {"preset": " ".join(printed.split())} | wrong


@answer(98)
def _(_item: SeedItem) -> Outcome:
    config = Config.model_validate(two_sizes())
    return {
        "problems": len(list(layout_rules.errors(two_sizes()))),
        "pools": len(config.pools),
        "admission": ", ".join(pool.admission.name for pool in config.pools.values()),
    }


@answer(104)
def _(_item: SeedItem) -> Outcome:
    gb200 = gpu_named("gb200")
    return {
        "domain_gpus": gb200.domain_gpus,
        "total_tb_s": 72 * 2 * gb200.link_bytes_s / 1e12,
        "tp_8_ep_64": checked(
            file(
                {"tp": 8, "dp": 8, "ep": 64}, model="deepseek-v3", hardware={"link_domain_gpus": 72}
            )
        ),
    }


@answer(105)
def _(_item: SeedItem) -> Outcome:
    return {"tp_16": checked(file({"tp": 16})), "tp_8_pp_2": checked(file({"tp": 8, "pp": 2}))}


@answer(108)
def _(_item: SeedItem) -> Outcome:
    group = PlannedGroup(Layout(8, ep=2), facts_of_name("deepseek-v3"), moe_tp=4, moe_ep=4)
    return {"options": trtllm_of_the_seed(), "finding": group_rules(group)}


@answer(109)
def _(_item: SeedItem) -> Outcome:
    return {"finding": checked(file({"tp": 1, "dp": 8, "ep": 4}, model="deepseek-v3"))}


@answer(110)
def _(_item: SeedItem) -> Outcome:
    group = PlannedGroup(
        Layout(8, ep=4), facts_of_name("deepseek-v3"), engine="sglang", all_to_all="deepep"
    )
    return {"finding": group_rules(group)}


@answer(111)
def _(_item: SeedItem) -> Outcome:
    source, target = (
        KvLayout(
            layers=8, kv_heads=8, head_dim=16, dtype=KvDtype.BF16, block_tokens=16, tp=tp, pp=pp
        )
        for tp, pp in ((4, 1), (2, 2))
    )
    plan = plan_transfer(source, target, [0], [0], 16)
    return {"bytes_of_16_tokens": plan.n_bytes}


@answer(116)
def _(_item: SeedItem) -> Outcome:
    groups = YAML(typ="safe").load(monitoring_files()[RULES])["groups"]
    alerts = [rule.get("alert") for group in groups for rule in group["rules"]]
    outcome: dict[str, object] = {}
    for objective in OBJECTIVES[:2]:
        outcome[objective.slo] = alerts.count(objective.alert)
        limits = [float(burn.limit(objective)) for burn in BURNS]
        outcome[f"{objective.slo}_late_share_that_pages"] = max(limits)
    return outcome


@answer(117)
def _(_item: SeedItem) -> Outcome:
    board = json.loads(monitoring_files()["deploy/grafana/penstock-overview.json"])
    marks = [each["expr"] for each in board["annotations"]["list"] if "expr" in each]
    before, after = (load_text(json.dumps(file({"tp": tp})).encode(), "x", {}) for tp in (4, 8))
    return {
        "annotation": " ".join(each.name for mark in marks for each in find_selectors(mark)),
        "change": "; ".join(map(str, diff(before, after))),
    }


def response(value: Any = None, status: int = 200, text: bytes = b"") -> ProbeResponse:
    return ProbeResponse(status, value, text, 0.01)


def findings(
    layout: Layout = Layout(4),  # noqa: B008
    configured: Mapping[str, Any] | None = None,
    context: int = 8192,
    pace: Mapping[str, tuple[float, float]] | None = None,
    **more: Any,
) -> dict[int, CheckFinding]:
    # Return the findings of `penstock doctor --seeds` about one engine with a 70B model.
    #
    # They are given by number of the statement.
    cards = {"data": [{"id": "llama-3.1-70b", "max_model_len": context}]}
    result = ProbeResult(
        "http://gpu1:8000",
        health=response(),
        models=response(cards),
        metrics=response(text=METRICS),
    )
    endpoint = Endpoint(
        "g", "http://gpu1:8000", "main", "", layout=layout, labels={"gpu": "h100"}, **more
    )
    config = Config.model_validate(configured or file({"tp": 4}))
    model, gpu = model_named("llama-3.1-70b"), gpu_named("h100")
    shares = {"g": collectives_share(model, gpu, layout.tp, 1, 8192)}
    fleet = CheckedFleet([CheckedEndpoint(endpoint, result)], config, pace or {}, shares)
    by_item: dict[int, CheckFinding] = {}
    for finding in seed_findings(run_checklist(fleet)):
        number = int(finding.check.split()[0])
        if number not in by_item or by_item[number].verdict.value == "pass":
            by_item[number] = finding
    return by_item


def told(found: CheckFinding) -> str:
    return f"{found.verdict}: {found.check}, {found.seen} {found.fix}".strip()


def _checklist(item: SeedItem) -> Outcome:
    return {"verdict": told(findings()[item.number])}


for _number in (86, 89, 91, 94):
    answer(_number)(_checklist)


def _links(_item: SeedItem) -> Outcome:
    return {"tp_4": told(findings()[87]), "tp_16": told(findings(Layout(16))[87])}


for _number in (85, 87):
    answer(_number)(_links)


def _pace(_item: SeedItem) -> Outcome:
    return {
        "verdict": told(findings(pace={"g": (0.012, 0.015)})[88]),
        "batching_gains_little": told(findings(pace={"g": (0.012, 0.09)})[88]),
    }


for _number in (82, 88):
    answer(_number)(_pace)


@answer(90)
def _(_item: SeedItem) -> Outcome:
    bare = file({"tp": 4})
    del bare["pools"]["main"]["endpoints"][0]["layout"]
    return {
        "verdict": told(findings()[90]),
        "undeclared": told(findings(configured=bare)[90]),
    }


@answer(92)
def _(_item: SeedItem) -> Outcome:
    return {
        "without": told(findings()[92]),
        "with_overflow": told(findings(configured=two_sizes())[92]),
    }


@answer(95)
def _(_item: SeedItem) -> Outcome:
    return {
        "verdict": told(findings()[95]),
        "other_context": told(findings(context=32_768, context_tokens=8192)[95]),
    }


@answer(96)
def _(_item: SeedItem) -> Outcome:
    slow = file({"tp": 4}, health={"progress": "60s"})
    return {"verdict": told(findings()[96]), "slow_checks": told(findings(configured=slow)[96])}


@answer(112)
def _(_item: SeedItem) -> Outcome:
    spec = {"url": "http://127.0.0.1:9000", "name": "tp8", "layout": {"dp": 2}, "pin_ranks": True}
    config = Config.model_validate({"version": 1, "pools": {"main": {"endpoints": [spec]}}})
    plan = EndpointRegistry(stand_in(WriteQueue, None)).plan(config)
    last = plan.members[-1]
    last.live.reconfigure(last.endpoint, last.spec, plan.timeouts, None)
    ranks = [parse_scrape(METRICS_OF_RANKS, EngineKind.VLLM, rank) for rank in (0, 1)]
    return {
        "endpoints": " ".join(member.endpoint.name for member in plan.members),
        "kv_usage_dp0": ranks[0].kv_usage,
        "kv_usage_dp1": ranks[1].kv_usage,
        "waiting_dp1": ranks[1].waiting,
        "kv_usage_engine": parse_scrape(METRICS_OF_RANKS, EngineKind.VLLM).kv_usage,
        "header": last.live.upstream.request_head("/v1/completions").decode(),
    }


@answer(115)
def _(_item: SeedItem) -> Outcome:
    def verdict(shares: Mapping[str, float]) -> str:
        fleet = CheckedFleet([], Config.model_validate(file({"tp": 8})), {}, shares)
        found = seed_findings(run_checklist(fleet))
        return next(told(each) for each in found if each.check.startswith("89 "))

    def share(model: str, gpu: str) -> float:
        return collectives_share(model_named(model), gpu_named(gpu), 8, 1, 8192)

    return {
        "70b_over_nvlink": verdict({"g": share("llama-3.1-70b", "h100")}),
        "8b_over_pcie": verdict({"g": share("llama-3.1-8b", "l40s")}),
        "unmeasured": verdict({}),
    }
