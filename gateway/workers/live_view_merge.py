"""The live view of several workers: their notes added up, how they stand made one. What it shows is gateway/admin/live_view.py's.

Percentiles are of all observations: sketches are added, not the percentiles made of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import msgspec

from gateway.admin.fleet_status import Pair, Standing
from gateway.admin.live_pages import Note
from gateway.admin.metric_samples import Mark
from gateway.metrics.quantile_sketch import Counts, merged
from gateway.workers.worker_process import LOST, Worker

NOTE_S = 2.0
LARGEST = ("in_flight", "backlog_tokens", "backlog_s")
"""Numbers of an endpoint that every worker knows the whole of, some a moment later."""
STATE = ("state", "cause", "slow", "since_s", "available")

Key = TypeVar("Key")
Row = TypeVar("Row")
_decoder = msgspec.msgpack.Decoder(Note)


class Watch:
    """Looks at the `workers` that serve. Remembers what those had noted who are gone, so that no sum ever falls."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._last: dict[Worker, Mark] = {}
        self._gone: Mark | None = None

    async def look(self, before: Mark | None) -> Note:
        """As live.hub.Look. Raises LookupError."""
        workers = self._workers()
        told = [each for each in await asyncio.gather(*map(_note, workers)) if each is not None]
        if not told:
            raise LookupError("no worker answers")
        self._last |= {worker: mark for worker, (mark, _) in told}
        for worker in self._last.keys() - set(workers):
            self._gone = added([*self._old(), self._last.pop(worker)])
        now = msgspec.structs.replace(
            added([*self._old(), *self._last.values()]),
            at=monotonic(),
            in_flight=_largest(mark.in_flight for _, (mark, _) in told),
            received=_largest(mark.received for _, (mark, _) in told),
        )
        return now if before is None else _sharing(now, before), together([standing for _, (_, standing) in told])

    def _old(self) -> list[Mark]:
        return [] if self._gone is None else [self._gone]


async def _note(worker: Worker) -> tuple[Worker, Note] | None:
    try:
        answer = await worker.ask("GET", "/live/note", timeout_s=NOTE_S)
        return (worker, _decoder.decode(answer.body)) if answer.status == 200 else None
    except (*LOST, msgspec.DecodeError):
        return None


def added(marks: Sequence[Mark]) -> Mark:
    """What all of them counted, as of the last. Nothing of what is no sum."""
    names = ("answers", "shed", "kept", "retries", "broke", "computed", "decisions")
    counts: dict[str, Any] = {name: _summed(getattr(mark, name) for mark in marks) for name in names}
    rows: dict[str, Any] = {
        **{name: _by_key(merged, (getattr(mark, name) for mark in marks)) for name in ("ttft", "tpot")},
        **{name: _by_key(_columns, (getattr(mark, name) for mark in marks)) for name in ("believed", "pairs")},
    }
    prompt, cached = (sum(part) for part in zip(*(mark.engine for mark in marks), strict=True))
    tokens = sum(mark.tokens for mark in marks)
    return Mark(at=marks[-1].at, tokens=tokens, engine=(prompt, cached), in_flight={}, received={}, **counts, **rows)


def together(told: Sequence[Standing]) -> Standing:
    """How all of them stand; the eldest's word where all say the same."""
    return msgspec.structs.replace(
        told[0],
        pools=_pools(told),
        endpoints=_endpoints(told),
        pairs=_pairs(told),
        under_way=sum(each.under_way for each in told),
        streams=sum(each.streams for each in told),
        shared=_shared(told),
        refused=next((each.refused for each in told if each.refused is not None), None),
        unlisted={name: message for each in told for name, message in each.unlisted.items()},
    )


def _shared(told: Sequence[Standing]) -> dict[str, Any] | None:
    """The state of one worker, of one with a problem if there is any."""
    known = [each.shared for each in told if each.shared is not None]
    return next((each for each in known if each["problem"]), known[0] if known else None)


def _pools(told: Sequence[Standing]) -> list[dict[str, Any]]:
    """Who is in and who waits added up; the highest price."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for each in told for row in each.pools):
        one = found.setdefault(row["name"], row)
        if one is not row:
            for name in ("in_flight", "waiting"):
                one[name] += row[name]
            one["price"] = max(one["price"], row["price"])
    return list(found.values())


def _endpoints(told: Sequence[Standing]) -> list[dict[str, Any]]:
    """Each once; it is out when one says so."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for each in told for row in each.endpoints):
        one = found.setdefault((row["pool"], row["url"]), row)
        if one is not row:
            one |= {name: max(one[name], row[name]) for name in LARGEST}
            one["silence_s"] = min(one["silence_s"], row["silence_s"])
            if one["available"] and not row["available"]:
                one |= {name: row[name] for name in STATE}
    return list(found.values())


def _pairs(told: Sequence[Standing]) -> dict[tuple[str, str], Pair]:
    """The handoffs of all workers: counts and newest times added, one mean."""
    found: dict[tuple[str, str], Pair] = {}
    for names, pair in ((names, pair) for each in told for names, pair in each.pairs.items()):
        one = found.get(names)
        if one is None:
            found[names] = pair
            continue
        served = one.served + pair.served
        known = [(each.mean_s, each.served) for each in (one, pair) if each.mean_s is not None]
        whole = sum(count for _, count in known)
        found[names] = Pair(
            served,
            one.failed + pair.failed,
            sum(mean_s * count for mean_s, count in known) / whole if whole else None,
            one.newest_s + pair.newest_s,
            one.transport or pair.transport,
        )
    return found


def _sharing(now: Mark, before: Mark) -> Mark:
    """Sketches that stand still share their counts with the note before, as those of one gateway do."""

    def same(after: Mapping[str, Counts], old: Mapping[str, Counts]) -> dict[str, Counts]:
        return {name: old[name] if old.get(name) == counts else counts for name, counts in after.items()}

    return msgspec.structs.replace(now, ttft=same(now.ttft, before.ttft), tpot=same(now.tpot, before.tpot))


def _summed(parts: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    total: dict[Key, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _by_key(add: Callable[[list[Row]], Row], parts: Iterable[Mapping[Key, Row]]) -> dict[Key, Row]:
    """The rows of each key added up."""
    rows: dict[Key, list[Row]] = {}
    for part in parts:
        for key, row in part.items():
            rows.setdefault(key, []).append(row)
    return {key: add(each) for key, each in rows.items()}


def _columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def _largest(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = max(value, found.get(name, 0))
    return found
