"""Detects workload drift: the shapes of requests differ from those that a fleet was sized for.

The shape of a request is its prompt length, answer length, uncached share and turn. Histograms of
the four are compared by the population stability index (PSI). The request rate is reported, but
raises no alarm: a layout is sized for shapes, and the number of replicas for rates. The gateway
(gateway/drift) and `penstock drift` use these functions. They read no clock and do no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import log, log2

import msgspec

MEASURES = ("prompt", "output", "uncached", "turns")
# Bins of powers of two for tokens and turns, of a tenth for the uncached share.
BINS: Mapping[str, int] = {"prompt": 21, "output": 17, "uncached": 10, "turns": 9}
WINDOW_S = 600.0
LIMIT = 0.2  # the usual limit of a PSI that calls for action
ALARM_WINDOWS = 2
LEAST_REQUESTS = 100  # minimum number of requests in a window from which conclusions are drawn
# Weight of a uniform distribution in each histogram, so that no bin is empty.
SMOOTHING = 0.5
BYTES_PER_TOKEN = 4  # assumed bytes of a body per prompt token, if no engine reports its tokens
# Events of a stream without a token: the role or the usage, and [DONE].
EVENTS_WITHOUT_TOKENS = 2
WARM_S: Mapping[str, float] = {"uncached": 1200.0, "turns": 3600.0}
"""Seconds after the start before which a measure is not compared, by measure.

Until then, prompts and sessions that began earlier would be taken for new ones.
"""

MAX_BLOCKS, MAX_SESSIONS = 1 << 21, 1 << 15
_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


class RequestShape(msgspec.Struct, frozen=True):
    """The shape of one request: the measures by which workload drift is detected.

    prompt_tokens   number of its prompt tokens
    output_tokens   number of its output tokens
    uncached_share  share of the prompt that was not seen before, 0 to 1
    turn            number of the request within its session, counted from 1
    """

    prompt_tokens: int
    output_tokens: int
    uncached_share: float
    turn: int = 1


def request_tokens(
    prompt_tokens: int | None, body_bytes: int, completion_tokens: int | None, events: int
) -> tuple[int, int]:
    """Return the prompt and output tokens of a request. Numbers that are not reported are
    estimated.

    prompt_tokens      as the engine reported; None: one token per four bytes of the body
    body_bytes         bytes of the request's body
    completion_tokens  as the engine reported; None: one token per event of the stream
    events             number of events of the streamed answer
    """
    prompt = body_bytes // BYTES_PER_TOKEN if prompt_tokens is None else prompt_tokens
    output = events - EVENTS_WITHOUT_TOKENS if completion_tokens is None else completion_tokens
    return prompt, max(1, output)


class ShapeMemory:
    """Remembers which prompt blocks and sessions it has seen, to recognise new ones.

    Blocks are in a table of fixed size, 8 bytes each. A new block replaces an older one, so a block
    is forgotten after about `blocks` further ones.
    """

    def __init__(self, blocks: int = MAX_BLOCKS, sessions: int = MAX_SESSIONS) -> None:
        """Create an empty memory of this size.

        blocks    number of prompt blocks that it can remember, a power of two
        sessions  number of sessions that it can remember
        """
        self._shift = 65 - blocks.bit_length()
        self._blocks = array("Q", bytes(8 * blocks))
        self._most_sessions = sessions
        self._turns: dict[int | str, int] = {}

    def shape(
        self, prompt_tokens: int, output_tokens: int, blocks: Sequence[int], session: int | str
    ) -> RequestShape:
        """Return the shape of the next request, and remember its blocks and session.

        blocks   chained 64-bit ids of the prompt's blocks; without any, the whole prompt counts as
                 new
        session  a key of its session; 0 or "": none
        """
        new, table, shift = 0, self._blocks, self._shift
        for block in blocks:
            # Complements are stored, so that the table's zeros are hardly ever a block's id.
            place, stored = (block * _GOLDEN & _MASK) >> shift, block ^ _MASK or 1
            if table[place] != stored:
                table[place] = stored
                new += 1
        share = new / len(blocks) if blocks else 1.0
        return RequestShape(prompt_tokens, output_tokens, share, self._turn(session))

    def _turn(self, session: int | str) -> int:
        if not session:
            return 1
        turn = self._turns.pop(session, 0) + 1
        self._turns[session] = turn
        if len(self._turns) > self._most_sessions:
            del self._turns[next(iter(self._turns))]
        return turn


class ShapeCounts:
    """Counts requests by size: a histogram for each measure, such as prompt length."""

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
        """Return the share of requests in each bin, by measure.

        The format is that of `sized_for` in the configuration.
        """
        total = max(1, self.requests)
        return {
            name: [round(count / total, 4) for count in counts]
            for name, counts in self.counts.items()
        }


def _power(number: int) -> int:
    return int(log2(max(1, number)))


def psi(expected: Sequence[float], counts: Sequence[int]) -> float:
    """Return the population stability index: how much the counts differ from the expected shares.

    expected  expected share of each bin
    counts    counted requests of each bin

    By chance, the index of equal distributions is (bins - 1) / requests on average. This is
    subtracted, so that small windows raise no alarm. The result is at least zero.
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
    """The result of one window (ten minutes or more) of requests.

    ends_s      end of the window in seconds
    index       stability index by measure; measures that are not compared yet are left out
    rate_ratio  requests per second, divided by the rate of the same hour when the fleet was sized;
                None: unknown
    is_alarm    whether any measure raises an alarm
    alarms      the measures that were above the limit in two consecutive windows
    """

    ends_s: float
    requests: int
    index: Mapping[str, float]
    rate_ratio: float | None
    is_alarm: bool
    alarms: tuple[str, ...] = ()

    @property
    def drifted(self) -> list[str]:
        above = [name for name, index in self.index.items() if index > LIMIT]
        return sorted(above, key=lambda name: -self.index[name])


class DriftWatch:
    """Compares windows of ten minutes with the request shapes that a fleet was sized for.

    If the same measure is above the limit in two consecutive windows, there is an alarm. A window
    with too few requests is joined with the next one. Windows end at multiples of ten minutes.
    Hours of the day count from time 0, so with Unix times they are hours of UTC.
    """

    def __init__(
        self,
        sized_for: Mapping[str, Sequence[float]],
        hourly_rates: Sequence[float] = (),
        began_s: float = 0.0,
    ) -> None:
        """Create a watch that begins at `began_s`, in seconds.

        sized_for     expected share of requests in each bin, by measure
        hourly_rates  requests per second in each hour of the day, 24 numbers; empty: unknown
        """
        self._sized_for, self._hourly_rates = sized_for, hourly_rates
        self._window, self._begins_s = ShapeCounts(), began_s
        self._ends_s = (began_s // WINDOW_S + 1) * WINDOW_S
        self._began_s, self._usual_requests = began_s, 0.0
        # The time from which blocks or sessions are remembered, by measure. Measures that are not
        # listed are remembered from the beginning.
        self._warm_from_s: dict[str, float] = {}
        self._above: dict[str, int] = dict.fromkeys(MEASURES, 0)

    @property
    def open_window(self) -> ShapeCounts:
        """Return the counts of the requests in the current time window, which has not ended."""
        return self._window

    def add(self, now_s: float, shape: RequestShape) -> Iterator[DriftWindow]:
        """Count a request that arrived at `now_s`, and yield the windows that ended before then.

        Times must not decrease.
        """
        yield from self.advance(now_s)
        self._window.add(shape)

    def advance(self, now_s: float) -> Iterator[DriftWindow]:
        """Yield the time windows that ended by the time `now_s` (seconds)."""
        while now_s >= self._ends_s:
            if self._hourly_rates:
                begun_s = max(self._begins_s, self._ends_s - WINDOW_S)
                hour = int((begun_s + self._ends_s) / 2 // 3600) % 24
                self._usual_requests += self._hourly_rates[hour] * (self._ends_s - begun_s)
            if self._window.requests >= LEAST_REQUESTS:
                yield self._close()
            self._ends_s += WINDOW_S

    def _is_warm(self, name: str) -> bool:
        began_s = self._warm_from_s.get(name, self._began_s)
        return self._begins_s >= began_s + WARM_S.get(name, 0.0)

    def _close(self) -> DriftWindow:
        window, self._window = self._window, ShapeCounts()
        warm = [name for name in MEASURES if self._is_warm(name)]
        index = {name: psi(self._sized_for[name], window.counts[name]) for name in warm}
        for name in MEASURES:
            self._above[name] = self._above[name] + 1 if index.get(name, 0.0) > LIMIT else 0
        usual, self._usual_requests = self._usual_requests, 0.0
        self._begins_s = self._ends_s
        ratio = window.requests / usual if usual else None
        alarms = tuple(name for name in MEASURES if self._above[name] >= ALARM_WINDOWS)
        return DriftWindow(self._ends_s, window.requests, index, ratio, bool(alarms), alarms)
