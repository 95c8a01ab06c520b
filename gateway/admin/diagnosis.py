"""What an operator would ask about, answered in words: who is out, who is slow, why requests were refused or retried.

Lives here: sentences from plain numbers, the gravest first. Not here: gathering the numbers (gateway/admin/live_view.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Grade = Literal["bad", "warn", "note"]

MOST = 8
SLOWER = 2.0
SILENT_S = 2.0
OUT = frozenset({"ejected", "dead"})
LEAST_MISSED = 0.01
GRADES: tuple[Grade, ...] = ("bad", "warn", "note")

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "connect_failed": "it takes no connections",
        "failed": "its answers failed or broke off",
        "timed_out": "it did not answer in time",
        "probe_failed": "its health check failed",
        "engine_dead": "its engine is dead or wedged",
        "slow": "it is much slower than its peers",
    }
)
"""Why an endpoint is out, by policies.health.health's word for it."""

SHEDS: Mapping[str, str] = MappingProxyType(
    {
        "waiting_room_full": "the waiting room was full",
        "waited_too_long": "no place came free in time",
        "too_slow": "their promise could not have been kept",
        "deadline": "their client would have left before",
        "body_budget": "request bodies took all their memory",
    }
)

WHOLE: Mapping[str, str] = MappingProxyType(
    {
        "short": "their prompts are short",
        "cached": "their prompts were cached where they were decoded",
        "whole_cheaper": "it was cheaper",
        "one_token": "they want one token",
        "choices": "they want several answers",
        "prompts": "they hold several prompts",
        "prompt_scores": "they want scores of the prompt",
        "no_pair": "no pair of endpoints was there",
        "recompute": "a handoff had failed",
    }
)
"""Why requests were not split, by policies.pricing.split's word for it."""

RETRIES: Mapping[str, str] = MappingProxyType(
    {
        "connect_failed": "the connection was not taken",
        "connect_timeout": "the connection was not taken in time",
        "timeout": "the engine was silent for too long",
        "truncated": "the connection was cut",
        "reset": "the connection was cut",
        "ejected": "the engine had died",
        "status_503": "the engine was full",
        "status_429": "the engine was full",
    }
)
"""Why requests were tried again, by what broke the first attempt."""

MISSES: Mapping[str, str] = MappingProxyType(
    {
        "ttft_missed": "the first token came late",
        "tpot_missed": "tokens came too slowly",
        "both_missed": "first token and pace were late",
        "failed": "the answer failed",
    }
)


class Reason(msgspec.Struct, frozen=True):
    """One sentence, how grave it is, and of which endpoint it speaks, if of one."""

    grade: Grade
    text: str
    endpoint: str | None = None


class Minute(msgspec.Struct, frozen=True):
    """What happened in it, as counts. `endpoints` are rows of the live view; `refused` is the configuration's."""

    endpoints: Sequence[Mapping[str, Any]]
    span_s: float
    shed: Mapping[str, float] = {}
    retries: Mapping[str, float] = {}
    missed: Mapping[str, float] = {}
    promised: float = 0.0
    computed: Mapping[str, float] = {}
    whole: Mapping[str, float] = {}
    split: float = 0.0
    prices: Mapping[str, float] = {}
    waiting: Mapping[str, int] = {}
    refused: str | None = None
    shared_problem: str | None = None
    unlisted: Sequence[str] = ()


def findings(minute: Minute) -> list[Reason]:
    """All there is to say, the gravest first."""
    found = [
        *_configuration(minute),
        *_shared(minute),
        *_unlisted(minute),
        *_out(minute.endpoints),
        *_shed(minute),
        *_waiting(minute),
        *_slow(minute.endpoints),
        *_missed(minute),
        *_retried(minute),
        *_priced(minute),
        *_recomputed(minute),
        *_whole(minute),
    ]
    return sorted(found, key=lambda each: GRADES.index(each.grade))


def shortened(found: Sequence[Reason]) -> Sequence[Reason]:
    """MOST of them: what speaks of no endpoint first, and a last sentence that counts the rest and names endpoints."""
    if len(found) <= MOST:
        return found
    general = [each for each in found if each.endpoint is None][: MOST - 2]
    single = [each for each in found if each.endpoint is not None][: MOST - 1 - len(general)]
    kept = [each for each in found if each in general or each in single]
    rest = [each for each in found if each not in kept]
    names = dict.fromkeys(each.endpoint for each in rest if each.endpoint is not None)
    of = f": {', '.join(names)}" if names else ""
    return [*kept, Reason(rest[0].grade, f"{len(rest)} more{of}.")]


def _configuration(minute: Minute) -> Iterator[Reason]:
    if minute.refused is not None:
        yield Reason("warn", f"The last configuration was rejected: {minute.refused}")


def _unlisted(minute: Minute) -> Iterator[Reason]:
    for message in minute.unlisted:
        yield Reason("bad", f"{message} Requests for it get 404; `penstock doctor --config FILE` has the remedy.")


def _shared(minute: Minute) -> Iterator[Reason]:
    if minute.shared_problem is not None:
        yield Reason("bad", f"Redis is not usable: {minute.shared_problem}. This gateway goes on alone.")


def _out(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Reason]:
    for each in endpoints:
        name, state, since = each["name"], each["state"], each["since_s"]
        ago = "" if since is None else f" for {span(since)}"
        if state in OUT:
            cause = _cause(each)
            asked = "; it is asked all the same, too many of its pool seem to fail" if each["available"] else ""
            yield Reason("bad", f"{name} is out{ago}: {cause}{asked}.", name)
        elif state == "returning":
            yield Reason("note", f"{name} is back{ago} and on trial.", name)
        elif state in ("draining", "drained"):
            yield Reason("note", f"{name} gets nothing new: an operator drained it.", name)
        elif each.get("slow"):
            yield Reason("warn", f"{name} gets few requests: it is {each['slow']}.", name)
        elif each["silence_s"] > SILENT_S:
            yield Reason("warn", f"{name} has owed every client a byte for {span(each['silence_s'])}.", name)


def _cause(each: Mapping[str, Any]) -> str:
    if each["cause"] == "slow" and each.get("slow"):
        return f"it was {each['slow']}"
    return CAUSES.get(each["cause"] or "", "not probed yet")


def _shed(minute: Minute) -> Iterator[Reason]:
    for reason, count in sorted(minute.shed.items(), key=lambda item: -item[1]):
        yield Reason("bad", f"{_requests(count)} refused: {SHEDS.get(reason, reason.replace('_', ' '))}.")


def _waiting(minute: Minute) -> Iterator[Reason]:
    for pool, count in minute.waiting.items():
        if count:
            yield Reason("warn", f"{_requests(count)} waiting in pool {pool}: every place at its endpoints is taken.")


def _slow(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Reason]:
    """Against the median of those who do the same work in the same pool, two of them or more."""
    for key, what in (("tpot_p50_s", "per token"), ("ttft_p50_s", "to the first token")):
        alike: dict[tuple[str, str], list[float]] = {}
        for each in endpoints:
            if each[key]:
                alike.setdefault((each["pool"], each["role"]), []).append(each[key])
        ordered = {group: sorted(values) for group, values in alike.items() if len(values) > 2}
        for each in endpoints:
            if each["state"] in OUT or each.get("slow"):
                continue  # said already
            values = ordered.get((each["pool"], each["role"]))
            usual = median_without(values, each[key]) if values and each[key] else None
            if usual and each[key] > SLOWER * usual:
                times = f"{each[key] / usual:.1f} times as slow as its peers {what}"
                yield Reason("warn", f"{each['name']} is {times}: {_ms(each[key])} to {_ms(usual)}.", each["name"])


def median_without(ordered: Sequence[float], value: float) -> float:
    """Of ascending values but for one that is this, of two or more others."""
    left_out, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (at if at < left_out else at + 1 for at in ((others - 1) // 2, others // 2))
    return (ordered[low] + ordered[high]) / 2


def _missed(minute: Minute) -> Iterator[Reason]:
    for kept, count in sorted(minute.missed.items(), key=lambda item: -item[1]):
        if kept in MISSES and count > LEAST_MISSED * minute.promised:
            yield Reason("warn", f"{count:.0f} of {minute.promised:.0f} promises broken: {MISSES[kept]}.")


def _retried(minute: Minute) -> Iterator[Reason]:
    for kind, count in sorted(minute.retries.items(), key=lambda item: -item[1]):
        why = RETRIES.get(kind, kind.replace("_", " "))
        yield Reason("warn", f"{_requests(count)} tried again elsewhere: {why}.")


def _priced(minute: Minute) -> Iterator[Reason]:
    for pool, price in minute.prices.items():
        if price > 0:
            yield Reason("warn", f"Pool {pool} is short: a place costs {price:.2f} times a request's worth.")


def _recomputed(minute: Minute) -> Iterator[Reason]:
    total = sum(minute.computed.values())
    for cause, why in (("spread", "another endpoint held them"), ("evicted", "their cache had lost them")):
        share = minute.computed.get(cause, 0.0) / total if total else 0.0
        if share >= 0.05:
            yield Reason("note", f"{share:.0%} of the prompt tokens computed could have been saved: {why}.")


def _whole(minute: Minute) -> Iterator[Reason]:
    total = minute.split + sum(minute.whole.values())
    for reason, count in sorted(minute.whole.items(), key=lambda item: -item[1])[:1]:
        if count >= 0.1 * total:
            yield Reason("note", f"{count / total:.0%} of the requests were not split: {WHOLE.get(reason, reason)}.")


def span(seconds: float) -> str:
    """A length of time as one says it: 0.4 s, 14 s, 3 min, 2 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _requests(count: float) -> str:
    return f"{count:.0f} request{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
