"""The diagnosis in the live view: sentences about problems of the endpoints, most severe first.

The sentences name endpoints that are out of rotation or slow. They also say why requests were
rejected, retried or not split. live_view.py collects the numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Grade = Literal["bad", "warn", "note"]

MAX_FINDINGS = 8
SLOW_RATIO = 2.0
SILENCE_S = 2.0
OUT_STATES = frozenset({"ejected", "dead"})
MIN_MISSED_SHARE = 0.01
GRADES: tuple[Grade, ...] = ("bad", "warn", "note")

CAUSE_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "connect_failed": "it accepts no connections",
        "failed": "its responses failed or broke off",
        "unresolved": "its host name cannot be resolved",
        "timed_out": "it did not respond in time",
        "probe_failed": "its health check failed",
        "engine_dead": "its engine is dead or stalled",
        "slow": "it is much slower than its peers",
    }
)
"""Sentence for each cause, from LiveEndpoint.cause, for which an endpoint is out of rotation."""

SHED_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "waiting_room_full": "the wait queue was full",
        "waited_too_long": "no endpoint had capacity in time",
        "too_slow": "they would have missed their SLO",
        "deadline": "they would have missed the client's deadline",
        "body_budget": "the memory for request bodies was used up",
    }
)

WHOLE_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "short": "their prompts are short",
        "cached": "the decode endpoint had their prompts cached",
        "whole_cheaper": "one endpoint was faster",
        "api": "their API cannot be split",
        "one_token": "they request one token",
        "choices": "they request several choices",
        "prompts": "they contain several prompts",
        "prompt_scores": "they request prompt logprobs",
        "no_pair": "no pair of endpoints was available",
        "recompute": "a handoff had failed",
    }
)
"""Sentence for each reason, from policies.pricing.split_decision, for which prefill and decode of
a request were not split.
"""

RETRY_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "connect_failed": "the connection failed",
        "connect_timeout": "the connection timed out",
        "connect_error": "the engine's host name could not be resolved",
        "local_error": "this gateway could not open a connection",
        "timeout": "the engine was silent for too long",
        "truncated": "the connection was closed early",
        "reset": "the connection was reset",
        "ejected": "the engine had died",
        "status_503": "the engine was full",
        "status_429": "the engine was full",
    }
)
"""Sentence for each error that made the gateway retry a request."""

MISS_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "ttft_missed": "the first token came late",
        "tpot_missed": "tokens came too slowly",
        "both_missed": "the first token came late and tokens came too slowly",
        "failed": "the response failed",
    }
)


class DiagnosisLine(msgspec.Struct, frozen=True):
    """One sentence of the live view's diagnosis, with its severity and the endpoint it concerns.

    The endpoint is None if the sentence concerns the whole gateway.
    """

    grade: Grade
    text: str
    endpoint: str | None = None


class MinuteCounts(msgspec.Struct, frozen=True):
    """What happened in the last minute, as input for the live view's diagnosis.

    endpoints        the endpoint rows of the live view
    span_s           seconds that the counts cover, at most a minute
    shed             number of refused requests by reason
    retries          number of retried requests by kind of failure
    missed           number of finished requests by SLO outcome, such as "ttft_missed"; "met" is one
                     of them
    slo_requests     total number of requests in `missed`
    computed_tokens  prompt tokens that engines computed, by cause
    whole_reasons    number of requests that were not split into prefill and decode, by reason
    split_count      number of requests that were split
    prices           current price of admission by pool; 0 without overload
    waiting          number of requests that wait now, by pool
    config_problem   first problem of the last rejected configuration, or None
    shared_problem   why state is not shared with other gateways, or None
    unlisted         a message about each configured model that no endpoint lists
    drift            a sentence for each pool whose requests no longer resemble the workload that it
                     was sized for
    """

    endpoints: Sequence[Mapping[str, Any]]
    span_s: float
    shed: Mapping[str, float] = {}
    retries: Mapping[str, float] = {}
    missed: Mapping[str, float] = {}
    slo_requests: float = 0.0
    computed_tokens: Mapping[str, float] = {}
    whole_reasons: Mapping[str, float] = {}
    split_count: float = 0.0
    prices: Mapping[str, float] = {}
    waiting: Mapping[str, int] = {}
    config_problem: str | None = None
    shared_problem: str | None = None
    unlisted: Sequence[str] = ()
    drift: Sequence[str] = ()


def diagnose(minute: MinuteCounts) -> list[DiagnosisLine]:
    """Return the diagnosis of the last minute: one sentence for each problem, most severe first."""
    reasons = [
        *_configuration(minute),
        *_shared(minute),
        *_unlisted(minute),
        *_out_of_rotation(minute.endpoints),
        *_shed(minute),
        *_waiting(minute),
        *_slow(minute.endpoints),
        *(DiagnosisLine("warn", text) for text in minute.drift),
        *_missed(minute),
        *_retried(minute),
        *_priced(minute),
        *_recomputed(minute),
        *_unsplit_requests(minute),
    ]
    return sorted(reasons, key=lambda reason: GRADES.index(reason.grade))


def shorten(reasons: Sequence[DiagnosisLine]) -> Sequence[DiagnosisLine]:
    """Return at most MAX_FINDINGS sentences of a diagnosis, in the same order.

    Sentences about the whole gateway take precedence. If some are left out, the last sentence says
    how many, and names their endpoints.
    """
    if len(reasons) <= MAX_FINDINGS:
        return reasons
    general = [reason for reason in reasons if reason.endpoint is None][: MAX_FINDINGS - 2]
    single = [reason for reason in reasons if reason.endpoint is not None][
        : MAX_FINDINGS - 1 - len(general)
    ]
    shown = [reason for reason in reasons if reason in general or reason in single]
    others = [reason for reason in reasons if reason not in shown]
    names = dict.fromkeys(reason.endpoint for reason in others if reason.endpoint is not None)
    suffix = f": {', '.join(names)}" if names else ""
    return [*shown, DiagnosisLine(others[0].grade, f"{len(others)} more{suffix}.")]


def _configuration(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    if minute.config_problem is not None:
        yield DiagnosisLine("warn", f"The last configuration was rejected: {minute.config_problem}")


def _unlisted(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for message in minute.unlisted:
        yield DiagnosisLine(
            "bad",
            f"{message} Requests for it get 404; `penstock doctor --config FILE` has the remedy.",
        )


def _shared(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    if minute.shared_problem is not None:
        yield DiagnosisLine(
            "bad",
            f"Redis is not usable: {minute.shared_problem}. "
            "This gateway runs without shared state.",
        )


def _out_of_rotation(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[DiagnosisLine]:
    for row in endpoints:
        name, state, since = row["name"], row["state"], row["since_s"]
        ago = "" if since is None else f" for {duration_text(since)}"
        if state in OUT_STATES:
            cause = _cause(row)
            exception = ""
            if row["available"]:
                exception = ", but still receives requests because too many of its pool fail"
            yield DiagnosisLine("bad", f"{name} is out of rotation{ago}: {cause}{exception}.", name)
        elif state == "returning":
            yield DiagnosisLine("note", f"{name} is back{ago}, on trial.", name)
        elif state in ("draining", "drained"):
            yield DiagnosisLine(
                "note", f"{name} receives no new requests: an operator drained it.", name
            )
        elif row.get("slow"):
            yield DiagnosisLine("warn", f"{name} receives few requests: it is {row['slow']}.", name)
        elif row["silence_s"] > SILENCE_S:
            silence = duration_text(row["silence_s"])
            text = f"{name} has sent no byte for {silence}, with requests in flight."
            yield DiagnosisLine("warn", text, name)


def _cause(row: Mapping[str, Any]) -> str:
    if row["cause"] == "slow" and row.get("slow"):
        return f"it was {row['slow']}"
    return CAUSE_TEXTS.get(row["cause"] or "", "not probed yet")


def _shed(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for reason, count in sorted(minute.shed.items(), key=lambda item: -item[1]):
        text = SHED_TEXTS.get(reason, reason.replace("_", " "))
        yield DiagnosisLine("bad", f"{_requests(count)} rejected: {text}.")


def _waiting(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for pool, count in minute.waiting.items():
        if count:
            yield DiagnosisLine(
                "warn", f"{_requests(count)} waiting in pool {pool}: its endpoints are at capacity."
            )


def _slow(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[DiagnosisLine]:
    # Yield endpoints that are slower than the median of those with the same pool and role.
    #
    # A group needs at least three endpoints.
    for key, what in (("tpot_p50_s", "per token"), ("ttft_p50_s", "to the first token")):
        groups: dict[tuple[str, str], list[float]] = {}
        for row in endpoints:
            if row[key]:
                groups.setdefault((row["pool"], row["role"]), []).append(row[key])
        ordered = {group: sorted(values) for group, values in groups.items() if len(values) > 2}
        for row in endpoints:
            if row["state"] in OUT_STATES or row.get("slow"):
                continue  # _out_of_rotation() reports these
            values = ordered.get((row["pool"], row["role"]))
            usual = median_without(values, row[key]) if values and row[key] else None
            if usual and row[key] > SLOW_RATIO * usual:
                ratio = f"{row[key] / usual:.1f} times as slow as its peers {what}"
                text = f"{row['name']} is {ratio}: {_ms(row[key])}, they {_ms(usual)}."
                yield DiagnosisLine("warn", text, row["name"])


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of `ordered` without one number that equals `value`.

    An endpoint's value is compared with this median of the values of all other endpoints. `ordered`
    must be sorted in ascending order.
    """
    left_out, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (
        index if index < left_out else index + 1 for index in ((others - 1) // 2, others // 2)
    )
    return (ordered[low] + ordered[high]) / 2


def _missed(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for outcome, count in sorted(minute.missed.items(), key=lambda item: -item[1]):
        if outcome in MISS_TEXTS and count > MIN_MISSED_SHARE * minute.slo_requests:
            share = f"{count:.0f} of {minute.slo_requests:.0f} requests"
            yield DiagnosisLine("warn", f"{share} missed their SLO: {MISS_TEXTS[outcome]}.")


def _retried(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for kind, count in sorted(minute.retries.items(), key=lambda item: -item[1]):
        text = RETRY_TEXTS.get(kind, kind.replace("_", " "))
        yield DiagnosisLine("warn", f"{_requests(count)} retried: {text}.")


def _priced(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    for pool, price in minute.prices.items():
        if price > 0:
            yield DiagnosisLine(
                "warn",
                f"Pool {pool} is overloaded: admission costs {price:.2f} times a request's value.",
            )


def _recomputed(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    total = sum(minute.computed_tokens.values())
    for cause, text in (
        ("spread", "another endpoint had them cached"),
        ("evicted", "the endpoint's cache had evicted them"),
    ):
        share = minute.computed_tokens.get(cause, 0.0) / total if total else 0.0
        if share >= 0.05:
            yield DiagnosisLine(
                "note", f"{share:.0%} of the computed prompt tokens were avoidable: {text}."
            )


def _unsplit_requests(minute: MinuteCounts) -> Iterator[DiagnosisLine]:
    total = minute.split_count + sum(minute.whole_reasons.values())
    for reason, count in sorted(minute.whole_reasons.items(), key=lambda item: -item[1])[:1]:
        if count >= 0.1 * total:
            text = WHOLE_TEXTS.get(reason, reason)
            yield DiagnosisLine(
                "note", f"{count / total:.0%} of the requests were not split: {text}."
            )


def duration_text(seconds: float) -> str:
    """Return a duration in seconds as text: 0.4 s, 14 s, 3 min, 2 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _requests(count: float) -> str:
    return f"{count:.0f} request{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
