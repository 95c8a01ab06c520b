"""Checks whether a replay of the current routing policy reproduces the access log.

If the result of the replay is better than the log, the simulated engines are faster than the real
ones, and no policy may be chosen by replays. If the result is worse, a policy may be chosen: its
replay must then exceed the logged result of the current policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from planner.auto.mean_error import error_of_mean, in_blocks
from planner.replay.results import ReplayRecord
from planner.traces.access_log import LoggedRequest
from policies.routing_types import Slo

LEAST_LINES = 50
"""Minimum number of logged requests from which a replay can be judged."""

GOODPUT_TOLERANCE = 0.1
"""Allowed excess of the replay over the log in the share of good requests, 0 to 1.

The error of that share, by chance, is allowed in addition.
"""

TPOT_RATIO, TTFT_RATIO = 1.25, 1.5
"""The medians of the log may exceed those of the replay by this ratio.

TPOT_RATIO  for the median TPOT
TTFT_RATIO  for the median TTFT
"""

SLACK = 0.1
"""A difference of medians below this share of the latency budget is ignored, whatever the ratio."""

MET = "met"


class ServedRequest(msgspec.Struct, frozen=True):
    """How one request was served, in the access log or in the replay.

    slo      its service class
    is_good  whether it was served within both latency budgets
    ttft_s   seconds to the first token; None: unknown
    tpot_s   seconds per further token; None: unknown
    """

    slo: Slo
    is_good: bool
    ttft_s: float | None
    tpot_s: float | None


def from_line(line: LoggedRequest, slo: Slo) -> ServedRequest | None:
    """Convert an access log line to a ServedRequest; None: the result of the request is unknown.

    A refused request counts as one that missed its latency budgets.
    """
    if line.status >= 400:
        return ServedRequest(slo, False, None, None)
    if not line.slo_outcome:
        return None
    received_us, first_us, last_us = line.received_us, line.first_token_us, line.last_us
    tokens = line.completion_tokens or max(0, line.events - 2)
    ttft_s = None if first_us is None or received_us is None else (first_us - received_us) / 1e6
    has_pace = first_us is not None and last_us is not None and tokens > 1 and line.events > 0
    tpot_s = (last_us - first_us) / 1e6 / (tokens - 1) if has_pace else None  # type: ignore[operator]
    return ServedRequest(slo, line.slo_outcome == MET, ttft_s, tpot_s)


def from_record(record: ReplayRecord) -> ServedRequest:
    return ServedRequest(record.slo, record.is_good, record.ttft_s, record.tpot_s)


def find_doubt(logged: Sequence[ServedRequest], replayed: Sequence[ServedRequest]) -> str:
    """Check that a replay of the current policy has about the same results as the access log.

    Returns "" if it has. Otherwise returns a text that says how much better the replay is, or that
    the log has too few requests of the policy.

    logged    the requests as the access log has them
    replayed  the same requests as the replay served them
    """
    if len(logged) < LEAST_LINES or not replayed:
        return f"the log has only {len(logged)} comparable requests of the policy in force"
    real, simulated = goodput(logged), goodput(replayed)
    gaps = [
        goodput(mine) - goodput(theirs)
        for mine, theirs in zip(in_blocks(logged), in_blocks(replayed), strict=True)
    ]
    if simulated - real > GOODPUT_TOLERANCE + error_of_mean(gaps):
        return f"{real:.0%} of requests were good, {simulated:.0%} in the replay"
    slo = logged[0].slo
    return _median_doubt(
        "TPOT",
        [request.tpot_s for request in logged],
        [request.tpot_s for request in replayed],
        TPOT_RATIO,
        SLACK * slo.tpot_s,
    ) or _median_doubt(
        "TTFT",
        [request.ttft_s for request in logged],
        [request.ttft_s for request in replayed],
        TTFT_RATIO,
        SLACK * slo.ttft_s,
    )


def goodput(requests: Sequence[ServedRequest | ReplayRecord]) -> float:
    """Return the share of requests within their latency budgets, weighted by class, or 0.0."""
    total = sum(request.slo.weight for request in requests)
    good = sum(request.slo.weight for request in requests if request.is_good)
    return good / total if total else 0.0


def _median_doubt(
    name: str,
    logged: Sequence[float | None],
    replayed: Sequence[float | None],
    ratio: float,
    slack_s: float,
) -> str:
    real = [value for value in logged if value is not None]
    simulated = [value for value in replayed if value is not None]
    if len(real) < LEAST_LINES or not simulated:
        return ""
    real_s, simulated_s = median(real), median(simulated)
    is_near = abs(real_s - simulated_s) <= slack_s
    if is_near or real_s <= ratio * simulated_s:
        return ""
    return f"the median {name} was {real_s:.3g} s, in the replay {simulated_s:.3g} s"
