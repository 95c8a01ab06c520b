"""The production checklist: checks of all endpoints and the configuration, each with a verdict.

An endpoint is one engine on one TP group (tensor parallelism). The checks follow a guide to tensor
parallelism for inference. They cover the smallest TP degree that fits, fast links within a group,
and decode speed at batch 1 and 16. They also cover admission control, a smaller model as fallback,
and failing fast. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from gateway.cli.doctor.engine_probe import ProbeResult, listed_models
from gateway.cli.doctor.findings import (
    CheckFinding,
    fail_finding,
    pass_finding,
    unknown_finding,
    warn_finding,
)
from gateway.config import Config, Hardware
from gateway.fleet import engine_metrics
from policies.routing_types import Endpoint
from policies.sizing.gpu_memory import Demand, check_memory
from policies.sizing.gpus import GPUS, Gpu
from policies.sizing.model_shapes import MODELS, Llm
from policies.sizing.parallelism_rules import PlannedGroup, layout_findings

FLEET_SUBJECT = "fleet"
KV_HEADROOM = 1.15
MAX_BATCH_SLOWDOWN = 4.0
# Maximum relative difference between an engine's KV cache and the computed size. Beyond it, the
# engine has other settings than assumed.
MAX_KV_DIFFERENCE = 0.1
# Share of a decode step that collectives may take. Above it, a larger TP size gains little.
MAX_COLLECTIVES = 0.3


class CheckedEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that `penstock doctor` checks, and the responses of its engine."""

    endpoint: Endpoint
    probe_result: ProbeResult

    @property
    def context_tokens(self) -> int | None:
        """Return the most tokens that a request to the engine may have; None if unknown."""
        lengths = [length for length in listed_models(self.probe_result).values() if length]
        return max(lengths, default=None)

    @property
    def model(self) -> Llm | None:
        """Return the built-in shape of the model that the engine serves; None if there is none."""
        names = (self.endpoint.served_model, *listed_models(self.probe_result))
        return next((MODELS[name.lower()] for name in names if name.lower() in MODELS), None)

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU model in the endpoint's label `gpu`; None if it is missing or unknown."""
        return GPUS.get(self.endpoint.labels.get("gpu", "").lower())

    @property
    def kv_tokens(self) -> int | None:
        """Return the KV cache size that the engine's metrics report, in tokens; None if unknown."""
        response = self.probe_result.metrics
        return (
            engine_metrics.parse_scrape(response.text, self.endpoint.engine).kv_tokens
            if response is not None and response.status == 200
            else None
        )


class CheckedFleet(msgspec.Struct, frozen=True):
    """What the production checklist is evaluated on: endpoints, configuration and measured speeds.

    config       the configuration; None for engines that were given without a file
    pace_s       by endpoint name: seconds per token at batch 1 and at batch 16, if measured
    collectives  by endpoint name: share (0 to 1) of a decode step at batch 1 that collective
                 operations such as all-reduce take. It is computed, and only for known models and
                 GPUs
    """

    members: Sequence[CheckedEndpoint]
    config: Config | None = None
    pace_s: Mapping[str, tuple[float, float]] = {}
    collectives: Mapping[str, float] = {}


def run_checklist(fleet: CheckedFleet) -> list[CheckFinding]:
    """Run all production checks on a fleet, and return the findings in a fixed order."""
    parts: tuple[Callable[[CheckedFleet], Iterator[CheckFinding]], ...] = (
        *(
            _fits,
            _as_computed,
            _links,
            _pace,
            _collectives,
            _explicit,
            _admission,
            _fallback,
            _quality,
            _memory,
            _sizing,
        ),
        *(_fails_fast, _cost),
    )
    return [finding for part in parts for finding in part(fleet)]


def _fits(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "TP degree fits weights and KV"
    for member in fleet.members:
        name, kv, context = member.endpoint.name, member.kv_tokens, member.context_tokens
        if kv is None or context is None:
            yield unknown_finding(
                name,
                check,
                "the engine does not report its KV size or context length",
                "compute weights + peak KV + 10 to 15 %",
            )
        elif kv < context * KV_HEADROOM:
            fix = "raise TP, quantise the weights, or lower --max-model-len"
            yield fail_finding(name, check, _kv_text(kv, context), fix)
        else:
            yield pass_finding(name, check, _kv_text(kv, context))


def _kv_text(kv_tokens: int, context_tokens: int) -> str:
    requests = kv_tokens / context_tokens
    return f"{kv_tokens:,} tokens of KV hold {requests:.1f} requests of {context_tokens:,} tokens"


def _as_computed(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    # Yield whether the KV cache sizes that engines report are near the computed ones.
    #
    # Only built-in models on known GPUs are compared.
    check = "KV size as computed"
    for member in fleet.members:
        endpoint, reported_tokens = member.endpoint, member.kv_tokens
        model, gpu = member.model, member.gpu
        if reported_tokens is None or model is None or gpu is None:
            continue
        computed = check_memory(model, gpu, endpoint.layout, Demand(1)).tokens
        text = f"the engine reports {reported_tokens:,} tokens, computed are {computed:,}"
        if abs(reported_tokens - computed) > MAX_KV_DIFFERENCE * computed:
            fix = "check --gpu-memory-utilization, the KV type, the GPU and the layout in the file"
            yield warn_finding(endpoint.name, check, text, fix)
        else:
            yield pass_finding(endpoint.name, check, text)


def _links(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "TP within one fast domain"
    multi_gpu = [endpoint.endpoint for endpoint in fleet.members if endpoint.endpoint.layout.tp > 1]
    domains = _link_domains(fleet)
    too_wide = {
        endpoint.name: finding
        for endpoint in multi_gpu
        for finding in layout_findings(PlannedGroup(endpoint.layout, domain=domains[endpoint.name]))
        if finding.code == "tp-domain"
    }
    if too_wide:
        finding = next(iter(too_wide.values()))
        text = f"{', '.join(too_wide)}: {finding.message}"
        yield fail_finding(FLEET_SUBJECT, check, text, finding.valid)
    elif multi_gpu:
        yield unknown_finding(
            FLEET_SUBJECT,
            check,
            "links between GPUs are not visible from the gateway",
            "run nvidia-smi topo -m: expect NV# between all GPUs of a group",
        )
    else:
        yield pass_finding(FLEET_SUBJECT, check, "no group is configured with more than one GPU")


def _link_domains(fleet: CheckedFleet) -> Mapping[str, int]:
    hardware = Hardware() if fleet.config is None else fleet.config.hardware
    pools = () if fleet.config is None else fleet.config.pools.values()
    named = {
        spec.display_name: min(hardware.domains[name].gpus for name in spec.layout.domains)
        for pool in pools
        for spec in pool.endpoints
        if spec.layout.domains
    }
    names = [member.endpoint.name for member in fleet.members]
    return {name: named.get(name, hardware.link_domain_gpus) for name in names}


def _pace(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "decode speed at batch 1 and 16"
    if not fleet.pace_s:
        yield unknown_finding(
            FLEET_SUBJECT,
            check,
            "not measured",
            "run penstock doctor --measure for a few requests, or penstock bench for a load",
        )
    for name, (one_s, many_s) in fleet.pace_s.items():
        speeds = f"{one_s * 1000:.1f} ms per token at batch 1, {many_s * 1000:.1f} ms at batch 16"
        if one_s > 0 and many_s > MAX_BATCH_SLOWDOWN * one_s:
            yield warn_finding(
                name, check, speeds, "batching gains little: check TP links, CPU and max-num-seqs"
            )
        else:
            yield pass_finding(name, check, speeds)


def _collectives(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "collective time per layer"
    fix = (
        "profile a decode step (nsys, torch profiler); "
        "if NCCL dominates, lower TP, quantise, or batch more"
    )
    if not fleet.collectives:
        text = "needs a profile of the engine, or labels: {gpu: ...} and a built-in model"
        yield unknown_finding(FLEET_SUBJECT, check, text, fix)
    for name, share in fleet.collectives.items():
        text = f"by the step-time equation {share:.0%} of a decode step at batch 1"
        if share > MAX_COLLECTIVES:
            yield warn_finding(name, check, text, fix)
        else:
            yield pass_finding(name, check, text)


def _explicit(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "TP size configured"
    if fleet.config is None:
        yield unknown_finding(
            FLEET_SUBJECT,
            check,
            "no configuration file given",
            "set layout: {tp: N} for each endpoint in the file",
        )
        return
    undeclared = [
        spec.display_name
        for pool in fleet.config.pools.values()
        for spec in pool.endpoints
        if "layout" not in spec.model_fields_set
    ]
    if undeclared:
        fix = "set layout: {tp: N} to the engine's TP size, also when it is 1"
        yield warn_finding(FLEET_SUBJECT, check, f"no layout for {', '.join(undeclared[:6])}", fix)
    else:
        yield pass_finding(FLEET_SUBJECT, check, "every endpoint has a layout")


def _admission(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "admission control with chunked prefill"
    if fleet.config is None:
        yield pass_finding(
            FLEET_SUBJECT,
            check,
            "requests beyond max_concurrency (24 per group) wait or are rejected",
        )
    else:
        pools = fleet.config.pools.items()
        pools_text = "; ".join(
            f"{name}: {pool.admission.name}, wait queue of {pool.waiting_room.size}"
            for name, pool in pools
        )
        chunked = "Chunked prefill is an engine setting, on by default in vLLM and SGLang"
        yield pass_finding(FLEET_SUBJECT, check, f"{pools_text}. {chunked}")


def _fallback(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "fallback to a smaller model"
    with_tiers = (
        []
        if fleet.config is None
        else [model.name for model in fleet.config.models if model.overflow]
    )
    if with_tiers:
        yield pass_finding(FLEET_SUBJECT, check, f"{', '.join(with_tiers)} have one")
    else:
        fix = "set models[].overflow to the model that serves when this one is full"
        yield warn_finding(FLEET_SUBJECT, check, "no model has an overflow to a smaller model", fix)


def _quality(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    models = [member.model for member in fleet.members]
    if all(model is not None and model.weight_bytes > 1 for model in models):
        text = "no engine serves quantised weights"
        yield pass_finding(FLEET_SUBJECT, "quality of quantised weights", text)
        return
    fix = "run penstock golden against BF16, again after every change of weights or engine"
    yield unknown_finding(
        FLEET_SUBJECT,
        "quality of quantised weights",
        "the gateway does not evaluate responses",
        fix,
    )


def _memory(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "KV memory monitored"
    unreported = [member.endpoint.name for member in fleet.members if member.kv_tokens is None]
    if unreported:
        yield fail_finding(
            FLEET_SUBJECT,
            check,
            f"{', '.join(unreported)} do not report KV usage and size",
            "enable the engines' metrics, and alert on KV usage above 90 %",
        )
    else:
        yield pass_finding(FLEET_SUBJECT, check, "all engines report KV usage and size")


def _sizing(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "context length as configured"
    for member in fleet.members:
        limit, reported = member.endpoint.context_tokens, member.context_tokens
        if limit is not None and reported is not None and limit != reported:
            text = f"context_tokens is {limit:,}, the engine reports {reported:,}"
            yield fail_finding(
                member.endpoint.name, check, text, "correct the file, and size the fleet again"
            )
            return
    yield pass_finding(
        FLEET_SUBJECT, check, "no configured context length differs from the engine's"
    )


def _fails_fast(fleet: CheckedFleet) -> Iterator[CheckFinding]:
    check = "a lost GPU fails fast"
    if fleet.config is None:
        yield pass_finding(
            FLEET_SUBJECT,
            check,
            "health checks every second; 5 s of silence with requests in flight eject a group",
        )
        return
    health = fleet.config.health
    silence = f"{health.progress:g} s of silence with requests in flight eject a group"
    text = f"health checks every {health.interval:g} s; {silence}"
    if health.progress > 30 or health.interval > 10:
        yield warn_finding(
            FLEET_SUBJECT,
            check,
            text,
            "clients wait this long: lower health.progress and health.interval",
        )
    else:
        yield pass_finding(FLEET_SUBJECT, check, f"{text}. Try it: penstock chaos lose-rank")


def _cost(_: CheckedFleet) -> Iterator[CheckFinding]:
    fix = "run penstock size MODEL --against SMALLER-MODEL with the traffic and promises"
    yield unknown_finding(
        FLEET_SUBJECT,
        "cost against replicas of a smaller model",
        "the cost depends on prices and on the quality that is needed",
        fix,
    )
