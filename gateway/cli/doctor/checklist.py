"""What a fleet of TP groups should have before production, point by point: passed, failed, or not to be seen from here.

The points are those of a guide to tensor parallelism for inference: the least TP degree that fits, fast links within a
group, decode speed at batch 1 and 16, admission control, a smaller model to fall back on, and failing fast. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from gateway.cli.doctor.findings import Finding, bad, doubtful, good, unknown
from gateway.cli.doctor.probe import Probed, models_of
from gateway.config import Config, Hardware
from gateway.fleet import scrape
from policies.model import Endpoint

FLEET = "fleet"
HEADROOM = 1.15
SLOW_AT_16 = 4.0


class Member(msgspec.Struct, frozen=True):
    """One endpoint of the fleet with what it said."""

    endpoint: Endpoint
    found: Probed

    @property
    def context(self) -> int | None:
        """The longest request it takes, tokens."""
        told = [length for length in models_of(self.found).values() if length]
        return max(told, default=None)

    @property
    def kv_tokens(self) -> int | None:
        said = self.found.metrics
        return (
            scrape.read(said.text, self.endpoint.engine).kv_tokens if said is not None and said.status == 200 else None
        )


class Fleet(msgspec.Struct, frozen=True):
    """Everything the points look at. `config` is None for engines without a file; `pace_s` holds seconds per token at
    batch 1 and 16 by name of the endpoint, if measured."""

    members: Sequence[Member]
    config: Config | None = None
    pace_s: Mapping[str, tuple[float, float]] = {}


def points(fleet: Fleet) -> list[Finding]:
    """All points, in the guide's order."""
    parts: tuple[Callable[[Fleet], Iterator[Finding]], ...] = (
        *(_fits, _links, _pace, _collectives, _explicit, _admission, _fallback, _quality, _memory, _sizing),
        *(_fails_fast, _cost),
    )
    return [finding for part in parts for finding in part(fleet)]


def _fits(fleet: Fleet) -> Iterator[Finding]:
    check = "TP degree fits weights and KV"
    for member in fleet.members:
        name, kv, context = member.endpoint.name, member.kv_tokens, member.context
        if kv is None or context is None:
            yield unknown(
                name, check, "its KV size or its context is not told", "compute weights + peak KV + 10 to 15 %"
            )
        elif kv < context * HEADROOM:
            fix = "raise TP, quantise the weights, or lower --max-model-len"
            yield bad(name, check, f"{kv:,} tokens of KV hold {kv / context:.1f} requests of {context:,}", fix)
        else:
            yield good(name, check, f"{kv:,} tokens of KV hold {kv / context:.1f} requests of {context:,}")


def _links(fleet: Fleet) -> Iterator[Finding]:
    check = "TP within one fast domain"
    wide = [each.endpoint for each in fleet.members if each.endpoint.layout.tp > 1]
    hardware = Hardware() if fleet.config is None else fleet.config.hardware
    domain = hardware.link_domain_gpus
    across = [each.name for each in wide if each.layout.tp > domain]
    if across:
        yield bad(
            FLEET,
            check,
            f"{', '.join(across)}: TP beyond {domain} GPUs leaves the link domain",
            "pipeline across link domains, TP within; hardware.link_domain_gpus says how large one is",
        )
    elif wide:
        yield unknown(
            FLEET, check, "links cannot be seen from here", "nvidia-smi topo -m: NV# between all GPUs of a group"
        )
    else:
        yield good(FLEET, check, "no group is said to span GPUs")


def _pace(fleet: Fleet) -> Iterator[Finding]:
    check = "decode speed at batch 1 and 16"
    if not fleet.pace_s:
        yield unknown(
            FLEET, check, "not measured", "penstock doctor --measure sends a few requests; penstock bench a load"
        )
    for name, (one_s, many_s) in fleet.pace_s.items():
        seen = f"{one_s * 1000:.1f} ms a token alone, {many_s * 1000:.1f} ms among 16"
        if one_s > 0 and many_s > SLOW_AT_16 * one_s:
            yield doubtful(name, check, seen, "batching hardly pays: look at TP links, CPU, max-num-seqs")
        else:
            yield good(name, check, seen)


def _collectives(_: Fleet) -> Iterator[Finding]:
    fix = "profile a decode step (nsys, torch profiler): if NCCL dominates, lower TP, quantise, or batch more"
    yield unknown(FLEET, "collective time per layer", "only a profile of the engine tells", fix)


def _explicit(fleet: Fleet) -> Iterator[Finding]:
    check = "TP size written down"
    if fleet.config is None:
        yield unknown(FLEET, check, "engines were given without a file", "write layout: {tp: N} beside each url")
        return
    silent = [
        spec.shown_name
        for pool in fleet.config.pools.values()
        for spec in pool.endpoints
        if "layout" not in spec.model_fields_set
    ]
    if silent:
        fix = "write layout: {tp: N} as the engine is started, also for 1"
        yield doubtful(FLEET, check, f"no layout of {', '.join(silent[:6])}", fix)
    else:
        yield good(FLEET, check, "every endpoint has its layout")


def _admission(fleet: Fleet) -> Iterator[Finding]:
    check = "admission control with chunked prefill"
    if fleet.config is None:
        yield good(FLEET, check, "requests beyond max_concurrency (24 a group) wait or are refused")
    else:
        pools = fleet.config.pools.items()
        told = "; ".join(f"{name}: {pool.admission.name}, room for {pool.waiting_room.size}" for name, pool in pools)
        yield good(FLEET, check, f"{told}. Chunked prefill is the engine's: on by default in vLLM and SGLang")


def _fallback(fleet: Fleet) -> Iterator[Finding]:
    check = "a smaller model when the large one is full"
    with_tiers = [] if fleet.config is None else [model.name for model in fleet.config.models if model.overflow]
    if with_tiers:
        yield good(FLEET, check, f"{', '.join(with_tiers)} overflow")
    else:
        yield doubtful(
            FLEET, check, "no model overflows into another", "models[].overflow names who serves instead of a refusal"
        )


def _quality(_: Fleet) -> Iterator[Finding]:
    fix = "run golden prompts against BF16 once, and after every change of weights or engine"
    yield unknown(FLEET, "quality of quantised weights", "the gateway reads no answers", fix)


def _memory(fleet: Fleet) -> Iterator[Finding]:
    check = "KV memory watched"
    blind = [each.endpoint.name for each in fleet.members if each.kv_tokens is None]
    if blind:
        yield bad(
            FLEET, check, f"{', '.join(blind)} do not tell their KV", "let them show metrics; alert on KV above 90 %"
        )
    else:
        yield good(FLEET, check, "all tell usage and size")


def _sizing(fleet: Fleet) -> Iterator[Finding]:
    check = "sizes as configured"
    for member in fleet.members:
        limit, told = member.endpoint.context_tokens, member.context
        if limit is not None and told is not None and limit != told:
            seen = f"context_tokens says {limit:,}, the engine {told:,}"
            yield bad(member.endpoint.name, check, seen, "correct the file, and size the fleet again")
            return
    yield good(FLEET, check, "no context differs from what the engines say")


def _fails_fast(fleet: Fleet) -> Iterator[Finding]:
    check = "a lost GPU fails fast"
    if fleet.config is None:
        yield good(FLEET, check, "health every second; silence of 5 s with requests in flight takes a group out")
        return
    health = fleet.config.health
    silence = f"silence of {health.progress:g} s with requests in flight takes a group out"
    seen = f"health every {health.interval:g} s; {silence}"
    if health.progress > 30 or health.interval > 10:
        yield doubtful(FLEET, check, seen, "clients wait as long: lower health.progress and health.interval")
    else:
        yield good(FLEET, check, f"{seen}. Try it: penstock chaos lose-rank")


def _cost(_: Fleet) -> Iterator[Finding]:
    fix = "penstock replay: the same trace on other layouts"
    yield unknown(FLEET, "cost against replicas of a smaller model", "a question of prices and quality", fix)
