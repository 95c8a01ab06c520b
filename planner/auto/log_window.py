"""Chooses the part of an access log to replay: the part in which no request is missing yet.

A request is logged when it ends. So the newest part of a log lacks the long answers. A replay of
that part would have emptier engines than in reality, so its requests must not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from planner.plan.recent_traffic import RecentTraffic
from planner.traces.access_log import LoggedRequest, arrived_s

COMPLETE = 0.98
"""Share of the requests (0 to 1) that must have ended for a part of the log to count."""

MOST_REQUESTS = 4_000
"""Maximum number of requests of one comparison, without those after the counted part."""

BEGUN_TOKENS = 64

MOST_WITH_LONG = 16_000
"""Maximum if more requests than a third of MOST_REQUESTS are in progress at a time."""


def complete_until(lines: Sequence[LoggedRequest], now_s: float) -> float:
    """Return the Unix time up to which the log contains nearly all requests that have arrived.

    lines  the log lines in order of arrival
    now_s  Unix time in seconds at which the log was read, or the end of the last logged request if
           that is later
    """
    if not lines:
        return now_s
    now_s = max(now_s, *(arrived_s(line) + _duration_s(line) for line in lines))
    # The newest half of the lines has too few long answers to show how long requests take.
    middle_s = (arrived_s(lines[0]) + now_s) / 2
    served = [line for line in lines if line.status < 400 and line.last_us is not None]
    durations = sorted(
        _duration_s(line) for line in served if arrived_s(line) <= middle_s
    ) or sorted(map(_duration_s, served))
    if not durations:
        return now_s
    return now_s - durations[min(len(durations) - 1, int(COMPLETE * len(durations)))]


def carry_over(lines: Sequence[LoggedRequest], begins_s: float) -> list[LoggedRequest]:
    """Return the requests in progress at the Unix time `begins_s`, changed to arrive at that time.

    Without them, the replay of an overloaded fleet would begin with empty queues. Of an answer that
    had begun, only the remaining tokens count. Its prompt was already computed, so it is replaced
    by one of BEGUN_TOKENS tokens.

    lines     the log lines
    begins_s  when the replay begins
    """
    carried = []
    for line in lines:
        ended_s = arrived_s(line) + _duration_s(line)
        if ended_s <= begins_s or line.status >= 400:
            continue
        change: dict[str, Any] = {"time": begins_s, "received_us": 0}
        first_s = inf if line.first_token_us is None else line.time + line.first_token_us / 1e6
        if first_s < begins_s:
            rest = (ended_s - begins_s) / (ended_s - first_s)
            tokens = line.completion_tokens or max(1, line.events - 2)
            change |= {"completion_tokens": max(1, round(rest * tokens)), "blocks": ()}
            change["prompt_tokens"] = min(line.prompt_tokens or BEGUN_TOKENS, BEGUN_TOKENS)
        carried.append(msgspec.structs.replace(line, **change))
    return carried


def _duration_s(line: LoggedRequest) -> float:
    return line.time + (line.last_us or 0) / 1e6 - arrived_s(line)


def choose_window(
    lately: RecentTraffic, counts_from_s: float, now_s: float, most: int = MOST_REQUESTS
) -> RecentTraffic:
    """Choose which recent requests a comparison of policies counts, and which only fill caches.

    lately         the recent requests of the log
    counts_from_s  Unix time before which requests only fill caches
    now_s          Unix time at which the log was read
    most           maximum number of requests before the end of the counted part

    The counted part ends before the newest requests, at most a third of all. If there are too many
    requests, the oldest are left out, and the oldest third of the rest only fills caches.
    """
    until_s = complete_until(lately.lines, now_s)
    lines = list(lately.lines)
    after = sum(arrived_s(line) >= until_s for line in lines)
    kept = min(len(lines) - after, max(most, min(3 * after, MOST_WITH_LONG)))
    first = len(lines) - after - kept
    earlier, lines = lines[:first], lines[first:]
    begins_s = arrived_s(lines[0])
    lines = [*carry_over(earlier, begins_s), *lines]
    from_s = max(counts_from_s, lately.from_s, begins_s)
    if first:
        from_s = max(from_s, arrived_s(lines[kept // 3]))
    return RecentTraffic(lines, begins_s, from_s, until_s)
