"""Why a request went where it went: the newest exchanges, kept in memory and shown as plain values.

Lives here: what is recorded at the pick and at the end, and the page of one request. Not here: HTTP
(admin), and the terms of a score, which the policy defines (policies.contract.Terms).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from gateway.exchange import Exchange
from gateway.protocol.stream_scan import Usage
from policies.contract import Policy, Terms
from policies.load import LOAD_FIELDS, EndpointLoad
from policies.model import Ask, Candidate, Pick

Ended = tuple[Exchange, Usage, int, float]
"""An ended exchange, the engine's token counts, the response's events, the end (monotonic)."""

_NUMBERS = tuple(name for name in LOAD_FIELDS if name not in ("belief", "entries", "timeline"))
numbers_of = attrgetter(*_NUMBERS)


class Before(msgspec.Struct, frozen=True):
    """The picked candidate and the runner-up, with their load values before the booking.

    Recording all candidates would cost as much as the pick. The latency models are not copied:
    terms that read them show their current state.
    """

    terms: Terms
    stood: tuple[tuple[Candidate, tuple[object, ...]], ...]

    def of(self, query: Ask, candidates: Sequence[Candidate]) -> Mapping[str, Mapping[str, float]]:
        """Return the score terms of both candidates, by endpoint name."""
        then = {
            id(candidate): Candidate(candidate.endpoint, restored(candidate, numbers))
            for candidate, numbers in self.stood
        }
        all_terms = self.terms(
            query, [then.get(id(candidate), candidate) for candidate in candidates]
        )
        return {
            candidate.endpoint.name: terms
            for candidate, terms in zip(candidates, all_terms, strict=True)
            if id(candidate) in then
        }


def restored(candidate: Candidate, numbers: tuple[object, ...]) -> EndpointLoad:
    """Rebuild the candidate's load from values that load_values() recorded."""
    load = EndpointLoad(candidate.load.slot, candidate.load.belief)
    for name, value in zip(_NUMBERS, numbers, strict=True):
        setattr(load, name, value)
    return load


def before(policy: Policy, pick: Pick) -> Before | None:
    """Record the candidates' loads before the booking; None for a policy that has no terms."""
    if policy.terms is None:
        return None
    stood = [(pick.candidate, numbers_of(pick.candidate.load))]
    other = runner_up(pick)
    if other is not None:
        stood.append((other, numbers_of(other.load)))
    return Before(policy.terms, tuple(stood))


def runner_up(pick: Pick) -> Candidate | None:
    """Return the candidate with the best score after the picked one; None if there was no other."""
    others = [index for index, candidate in enumerate(pick.kept) if candidate is not pick.candidate]
    return pick.kept[max(others, key=pick.scores.__getitem__)] if others else None


class Explained:
    """A ring buffer of the newest `size` ended exchanges. Owned by Accounting."""

    __slots__ = ("_ring", "size")

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._ring: deque[Ended] = deque(maxlen=size)

    def resize(self, size: int) -> None:
        """Set the capacity; a change drops all entries."""
        if size != self.size:
            self.size, self._ring = size, deque(maxlen=size)

    def keep(self, exchange: Exchange, usage: Usage, events: int, now: float) -> None:
        """Add an ended exchange and free its large objects."""
        exchange.forget()
        self._ring.append((exchange, usage, events, now))

    def newest_first(self) -> Iterator[Ended]:
        return reversed(self._ring)

    def newest(self) -> dict[str, object] | None:
        """Return the page of the request that ended last; None if there is none."""
        return told(self._ring[-1][0]) if self._ring else None

    def find(self, request_id: str) -> dict[str, object] | None:
        """Return the page of one request; None if it is not, or no longer, stored. O(size)."""
        return next((told(ended[0]) for ended in self._ring if ended[0].id == request_id), None)


def told(exchange: Exchange) -> dict[str, object]:
    """Return everything that led to the response, as plain values for JSON."""
    split = exchange.split
    return {
        "id": exchange.id,
        "trace_id": None if exchange.trace is None else exchange.trace.trace_id,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "model": exchange.model,
        "tier": exchange.tier or None,
        "tenant": exchange.tenant,
        **_request(exchange),
        "admission": _admission(exchange),
        "pick": None if exchange.pick is None else _pick(exchange, exchange.pick),
        "retries": exchange.retries,
        "split": None if split is None else {"reason": split.reason, "prefill": split.prefill},
        "predicted": {"ttft_s": exchange.predicted_ttft_s, "tpot_s": exchange.predicted_tpot_s},
        "actual": {"ttft_s": exchange.ttft_s, "tpot_s": exchange.tpot_s},
        "kept": exchange.kept or None,
    }


def _request(exchange: Exchange) -> dict[str, object]:
    if exchange.call is None:
        return {}
    request = exchange.call.request
    deadline_s = None if request.deadline_s is None else request.deadline_s - request.arrived_s
    return {
        "slo": msgspec.structs.asdict(request.slo),
        "priority": request.priority,
        "deadline_s": deadline_s,
        "in_session": bool(request.session),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }


def _admission(exchange: Exchange) -> dict[str, object]:
    if exchange.admitted_at is None or exchange.parsed_at is None:
        return {"verdict": "refused", "reason": exchange.reason, "detail": exchange.detail}
    waited_s = exchange.admitted_at - exchange.parsed_at
    return {"verdict": "admitted", "waited_s": round(waited_s, 6)}


def _pick(exchange: Exchange, pick: Pick) -> dict[str, object]:
    other = runner_up(pick)
    terms: Mapping[str, Mapping[str, float]] = {}
    if exchange.before is not None and exchange.asked is not None:
        terms = exchange.before.of(exchange.asked, pick.kept)
    rows = sorted(zip(pick.scores, pick.kept, strict=True), key=lambda row: -row[0])
    return {
        "policy": pick.reason,
        "endpoint": pick.candidate.endpoint.name,
        "runner_up": None if other is None else other.endpoint.name,
        "candidates": [_candidate(exchange, score, candidate, terms) for score, candidate in rows],
    }


def _candidate(
    exchange: Exchange,
    score: float,
    candidate: Candidate,
    terms: Mapping[str, Mapping[str, float]],
) -> dict[str, object]:
    row: dict[str, object] = {"endpoint": candidate.endpoint.name, "score": score}
    query = exchange.asked
    if query is not None and candidate.load.slot < len(query.cached):
        row["cached_tokens"] = query.cached[candidate.load.slot]
    if candidate.endpoint.name in terms:
        row["terms"] = dict(terms[candidate.endpoint.name])
    return row
