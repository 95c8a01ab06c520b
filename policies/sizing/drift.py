"""Detects workload drift: requests whose shapes differ from those that a fleet was sized for.

Histograms of four measures are compared by the population stability index (PSI). The rate is shown
beside the one of the same hour, and never alarms: a layout is sized for shapes, replicas for rates.
No clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log, log2

import msgspec

MEASURES = ("prompt", "output", "uncached", "turns")
# Bins of powers of two for tokens and turns, of a tenth for the uncached share.
BINS: Mapping[str, int] = {"prompt": 21, "output": 17, "uncached": 10, "turns": 9}
WINDOW_S = 600.0
LIMIT = 0.2  # the usual limit of a PSI that calls for action
ALARM_WINDOWS = 2
LEAST_REQUESTS = 100  # a window with fewer says nothing
# Weight of a uniform distribution in each histogram, so that no bin is empty.
SMOOTHING = 0.5


class RequestShape(msgspec.Struct, frozen=True):
    """The shape of one request: the measures by which workload drift is detected.

    `turn` is the number of the request within its session, counted from 1.
    """

    prompt_tokens: int
    output_tokens: int
    uncached_share: float
    turn: int = 1


class ShapeCounts:
    """Counts requests by bin of each measure, such as prompt length."""

    def __init__(self) -> None:
        self.requests = 0
        self.counts = {name: [0] * bins for name, bins in BINS.items()}

    def add(self, shape: RequestShape) -> None:
        self.requests += 1
        places = (
            _power(shape.prompt_tokens),
            _power(shape.output_tokens),
            int(shape.uncached_share * 10),
            _power(shape.turn),
        )
        for name, place in zip(MEASURES, places, strict=True):
            self.counts[name][min(place, BINS[name] - 1)] += 1

    def shares(self) -> dict[str, list[float]]:
        """Return the share of requests in each bin, by measure, in the form of `sized_for` in the
        configuration.
        """
        total = max(1, self.requests)
        return {
            name: [round(count / total, 4) for count in counts]
            for name, counts in self.counts.items()
        }


def _power(number: int) -> int:
    return int(log2(max(1, number)))


def psi(expected: Sequence[float], counts: Sequence[int]) -> float:
    """Return the population stability index of counts against expected shares, less its bias.

    Equal distributions have a positive index by chance, (bins - 1) / requests on average; it is
    subtracted, so that small windows do not alarm. The result is at least zero.
    """
    total, bins = sum(counts), len(counts)
    if not total:
        return 0.0
    whole = sum(expected) or 1.0
    index = 0.0
    used = 0
    for share, count in zip(expected, counts, strict=True):
        if not share and not count:
            continue
        used += 1
        wanted = (share / whole * total + SMOOTHING) / (total + SMOOTHING * bins)
        found = (count + SMOOTHING) / (total + SMOOTHING * bins)
        index += (found - wanted) * log(found / wanted)
    return max(0.0, index - (used - 1) / total)


class DriftWindow(msgspec.Struct, frozen=True):
    """One window of requests: the stability index of each measure, and whether the window raises an
    alarm.

    ends_s      end of the window in seconds
    rate_ratio  requests per second over those of the same hour when it was sized; None: unknown
    """

    ends_s: float
    requests: int
    index: Mapping[str, float]
    rate_ratio: float | None
    is_alarm: bool

    @property
    def drifted(self) -> list[str]:
        above = [name for name, index in self.index.items() if index > LIMIT]
        return sorted(above, key=lambda name: -self.index[name])


class DriftWatch:
    """Compares windows of ten minutes with the shapes that a fleet was sized for.

    Two windows in succession in which the same measure is above the limit are an alarm. A window
    with too few requests is joined with the next.
    """

    def __init__(
        self, sized_for: Mapping[str, Sequence[float]], hourly_rates: Sequence[float] = ()
    ) -> None:
        self._sized_for, self._hourly_rates = sized_for, hourly_rates
        self._window, self._begins_s, self._ends_s = ShapeCounts(), 0.0, WINDOW_S
        self._above: dict[str, int] = dict.fromkeys(MEASURES, 0)

    def add(self, now_s: float, shape: RequestShape) -> Iterator[DriftWindow]:
        """Count a request that arrived at `now_s`, and yield the windows that ended before then.

        Times must not decrease.
        """
        while now_s >= self._ends_s:
            if self._window.requests >= LEAST_REQUESTS:
                yield self._close()
            self._ends_s += WINDOW_S
        self._window.add(shape)

    def _close(self) -> DriftWindow:
        window, self._window = self._window, ShapeCounts()
        index = {name: psi(self._sized_for[name], window.counts[name]) for name in MEASURES}
        for name, value in index.items():
            self._above[name] = self._above[name] + 1 if value > LIMIT else 0
        seconds, self._begins_s = self._ends_s - self._begins_s, self._ends_s
        hour = int(self._ends_s // 3600) % 24
        usual = self._hourly_rates[hour] if self._hourly_rates else 0.0
        ratio = window.requests / seconds / usual if usual else None
        is_alarm = any(count >= ALARM_WINDOWS for count in self._above.values())
        return DriftWindow(self._ends_s, window.requests, index, ratio, is_alarm)
