"""Compares the requests of each pool with the workload it was sized for, every ten minutes.

The section `sized_for` of the configuration describes that workload. The comparison is that of
`penstock drift` (policies/sizing/workload_drift.py). The monitor runs in the gateway process. With
several workers it runs in their supervisor, which sees all requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.config import Config, SizedFor
from gateway.metrics.drift_metrics import DriftMetrics
from gateway.telemetry.drift_records import ShapeRecord, ShapeRecorder
from policies import restart_state
from policies.restart_state import DriftState, SessionTurns
from policies.sizing.workload_drift import LIMIT, MEASURES, DriftWatch, DriftWindow, ShapeMemory

log = logging.getLogger("penstock")


class WatchedPool:
    """A pool whose requests are compared with the workload that it was sized for.

    It keeps the result of the last ten minutes. `since_s` is the Unix time at which the current
    alarm began.
    """

    __slots__ = ("last", "since_s", "sized_for", "watch")

    def __init__(self, sized_for: SizedFor, now_s: float) -> None:
        self.sized_for = sized_for
        shares = {name: getattr(sized_for, name) for name in MEASURES}
        self.watch = DriftWatch(shares, sized_for.hourly_rates, now_s)
        self.last: DriftWindow | None = None
        self.since_s: float | None = None


class DriftMonitor:
    """Compares the requests of pools with the workloads that the pools were sized for.

    It watches all pools that have a section `sized_for`. Times are Unix seconds.
    """

    def __init__(self, metrics: DriftMetrics) -> None:
        self._metrics = metrics
        self._pools: dict[str, WatchedPool] = {}
        self._memory: ShapeMemory | None = None  # 16 MiB, so only if a pool is watched

    @property
    def is_watching(self) -> bool:
        return bool(self._pools)

    def configure(self, config: Config, now_s: float) -> None:
        """Watch the pools of a new configuration; restart the counts where `sized_for` changed."""
        for name in [*self._pools]:
            if config.sized_for.get(name) != self._pools[name].sized_for:
                del self._pools[name]
                self._metrics.remove_pool(name)
        for name, sized_for in config.sized_for.items():
            if name not in self._pools:
                self._pools[name] = WatchedPool(sized_for, now_s)
        if not self._pools:
            self._memory = None
        elif self._memory is None:
            self._memory = ShapeMemory()

    def feed(self, records: Iterable[ShapeRecord]) -> None:
        """Count ended requests. Records of several processes must be sorted by time."""
        memory = self._memory
        if memory is None:
            return
        for record in records:
            shape = memory.shape(
                record.prompt_tokens, record.output_tokens, record.blocks, record.session
            )
            pool = self._pools.get(record.pool)
            if pool is not None:
                for window in pool.watch.add(record.at_s, shape):
                    self._conclude(record.pool, pool, window)

    def advance(self, now_s: float) -> None:
        """Compare the requests of each ten-minute window that has ended with `sized_for`."""
        for name, pool in self._pools.items():
            for window in pool.watch.advance(now_s):
                self._conclude(name, pool, window)

    def _conclude(self, name: str, pool: WatchedPool, window: DriftWindow) -> None:
        pool.last = window
        self._metrics.windows.labels(name).inc()
        for measure in MEASURES:
            index = window.index.get(measure)
            if index is not None:
                self._metrics.psi.labels(name, measure).set(round(index, 4))
            is_alarm = float(measure in window.alarms)
            self._metrics.alarm.labels(name, measure).set(is_alarm)
        if window.rate_ratio is not None:
            self._metrics.rate.labels(name).set(round(window.rate_ratio, 4))
        if window.is_alarm and pool.since_s is None:
            pool.since_s = window.ends_s
            log.warning("%s", drift_text(name, window))
        elif not window.is_alarm and pool.since_s is not None:
            pool.since_s = None
            log.info("pool %s: requests have again the shapes that the pool was sized for", name)

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each pool whose requests differ from its `sized_for`.

        The live view shows the sentences.
        """
        return tuple(
            drift_text(name, pool.last)
            for name, pool in self._pools.items()
            if pool.last is not None and pool.last.is_alarm
        )

    def as_json(self) -> dict[str, Any]:
        """Return the state of all watched pools as JSON-compatible values."""
        return {
            "limit": LIMIT,
            "pools": [self._pool_as_json(name, pool) for name, pool in self._pools.items()],
        }

    def _pool_as_json(self, name: str, pool: WatchedPool) -> dict[str, Any]:
        last = pool.last
        return {
            "pool": name,
            "drift": last is not None and last.is_alarm,
            "since": None if pool.since_s is None else _iso(pool.since_s),
            "measures": [] if last is None else list(last.alarms),
            "window": None if last is None else _window_as_json(last),
            "open_window": {
                "requests": pool.watch.open_window.requests,
                "counts": pool.watch.open_window.counts,
            },
        }

    def states(self) -> list[DriftState | SessionTurns]:
        """Return the state of the monitor, to be saved for a successor process.

        The state has the counts of each pool's current ten minutes, and the number of requests so
        far of each session (conversation).
        """
        if self._memory is None:
            return []
        rows: list[DriftState | SessionTurns] = [
            restart_state.drift_state(name, pool.watch) for name, pool in self._pools.items()
        ]
        return [*rows, *restart_state.session_turns(self._memory)]

    def restore(self, state: DriftState | SessionTurns) -> None:
        """Restore the states that another process has saved.

        The state of a pool whose `sized_for` has changed is ignored.
        """
        if self._memory is None:
            return
        if isinstance(state, SessionTurns):
            restart_state.restore_turns(self._memory, state)
        elif state.pool in self._pools:
            restart_state.restore_drift(self._pools[state.pool].watch, state)


class LocalDriftWatch:
    """Passes the lengths of this process's ended requests to its drift monitor, if it has one.

    The monitor compares the lengths with the workload that a pool was sized for.
    """

    def __init__(self, recorder: ShapeRecorder, monitor: DriftMonitor | None) -> None:
        self._recorder, self._monitor = recorder, monitor

    def configure(self, config: Config, now_s: float) -> None:
        """Start to compare the requests of the configured pools that have a `sized_for`.

        `now_s` is Unix time.
        """
        self._recorder.pools = frozenset(config.sized_for)
        if self._monitor is not None:
            self._monitor.configure(config, now_s)

    def sweep(self, now_s: float) -> None:
        """Count the requests that have ended since the last call; `now_s` is Unix time."""
        if self._monitor is not None and self._monitor.is_watching:
            self._monitor.feed(self._recorder.pop_records())
            self._monitor.advance(now_s)


def drift_text(pool: str, window: DriftWindow) -> str:
    """Return a sentence about how a pool's last ten minutes differ from its `sized_for`."""
    measures = ", ".join(
        f"{TEXTS[name]} (PSI {window.index.get(name, 0.0):.2f})" for name in window.alarms
    )
    return (
        f"Pool {pool} was sized for other requests: {measures} differ from sized_for. "
        "`penstock drift LOG --config FILE` says whether another layout gains."
    )


TEXTS: Mapping[str, str] = {
    "prompt": "prompt lengths",
    "output": "answer lengths",
    "uncached": "new shares of prompts",
    "turns": "turns of sessions",
}


def _window_as_json(window: DriftWindow) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(window)
    index = {name: round(value, 4) for name, value in window.index.items()}
    ratio = None if window.rate_ratio is None else round(window.rate_ratio, 4)
    return plain | {"ends": _iso(window.ends_s), "index": index, "rate_ratio": ratio}


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
