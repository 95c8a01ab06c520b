"""Why a request went where it went: the newest exchanges, kept for who asks, and told as plain values.

Lives here: what is kept at the pick and afterwards, and the page of one request. Not here: HTTP (admin.py), or the
reasons themselves, which are the policy's (policies.contract.Terms).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from gateway.exchange import Exchange
from gateway.told import Usage
from policies.contract import Policy, Terms
from policies.load import EndpointLoad
from policies.model import Ask, Candidate, Pick

Ended = tuple[Exchange, Usage, int, float]
"""A request that is over, the token counts its engine gave, the events of its answer, and when it ended (monotonic)."""

_NUMBERS = tuple(name for name in EndpointLoad.__slots__ if name not in ("belief", "entries", "timeline"))
numbers_of = attrgetter(*_NUMBERS)


class Before(msgspec.Struct, frozen=True):
    """The picked candidate and the runner-up, with their live numbers as they were: those change with the booking.

    Noting them for all candidates would cost as much as the pick. What is believed of speeds is as it is when asked.
    """

    terms: Terms
    stood: tuple[tuple[Candidate, tuple[object, ...]], ...]

    def of(self, ask: Ask, kept: Sequence[Candidate]) -> Mapping[str, Mapping[str, float]]:
        """The parts of their scores, by name of the endpoint."""
        then = {id(each): Candidate(each.endpoint, restored(each, numbers)) for each, numbers in self.stood}
        told = self.terms(ask, [then.get(id(each), each) for each in kept])
        return {each.endpoint.name: parts for each, parts in zip(kept, told, strict=True) if id(each) in then}


def restored(candidate: Candidate, numbers: tuple[object, ...]) -> EndpointLoad:
    """The candidate's load as it was when `numbers_of` it were noted."""
    load = EndpointLoad(candidate.load.slot, candidate.load.belief)
    for name, value in zip(_NUMBERS, numbers, strict=True):
        setattr(load, name, value)
    return load


def before(policy: Policy, pick: Pick) -> Before | None:
    """What must be noted before the place is taken; nothing for a policy that has no terms."""
    if policy.terms is None:
        return None
    stood = [(pick.candidate, numbers_of(pick.candidate.load))]
    other = runner_up(pick)
    if other is not None:
        stood.append((other, numbers_of(other.load)))
    return Before(policy.terms, tuple(stood))


def runner_up(pick: Pick) -> Candidate | None:
    """Who would have been picked next: the best score but the picked one's; None when nobody else was kept."""
    others = [at for at, each in enumerate(pick.kept) if each is not pick.candidate]
    return pick.kept[max(others, key=pick.scores.__getitem__)] if others else None


class Explained:
    """The newest `size` requests that are over, oldest overwritten first. One owner: accounts."""

    __slots__ = ("_ring", "size")

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._ring: deque[Ended] = deque(maxlen=size)

    def resize(self, size: int) -> None:
        """From now on so many; those that were kept are forgotten when the number changes."""
        if size != self.size:
            self.size, self._ring = size, deque(maxlen=size)

    def keep(self, x: Exchange, usage: Usage, events: int, now: float) -> None:
        """Add a request that is over. Nothing is kept with a size of 0."""
        x.forget()
        self._ring.append((x, usage, events, now))

    def newest_first(self) -> Iterator[Ended]:
        """The requests that are kept."""
        return reversed(self._ring)

    def newest(self) -> dict[str, object] | None:
        """The page of the request that was over last."""
        return told(self._ring[-1][0]) if self._ring else None

    def find(self, request_id: str) -> dict[str, object] | None:
        """The page of one request; None when it is not, or no longer, known. O(size)."""
        return next((told(ended[0]) for ended in self._ring if ended[0].id == request_id), None)


def told(x: Exchange) -> dict[str, object]:
    """Everything that led to the answer, in plain values."""
    return {
        "id": x.id,
        "trace_id": None if x.trace is None else x.trace.trace_id,
        "status": x.status,
        "outcome": x.outcome,
        "model": x.model,
        "tier": x.tier or None,
        "tenant": x.tenant,
        **_request(x),
        "admission": _admission(x),
        "pick": None if x.pick is None else _pick(x, x.pick),
        "retries": x.retries,
        "split": None if x.split is None else {"reason": x.split.reason, "prefill": x.split.prefill},
        "predicted": {"ttft_s": x.predicted_ttft_s, "tpot_s": x.predicted_tpot_s},
        "actual": {"ttft_s": x.ttft_s, "tpot_s": x.tpot_s},
        "kept": x.kept or None,
    }


def _request(x: Exchange) -> dict[str, object]:
    if x.call is None:
        return {}
    request = x.call.request
    deadline_s = None if request.deadline_s is None else request.deadline_s - request.arrived_s
    return {
        "slo": msgspec.structs.asdict(request.slo),
        "priority": request.priority,
        "deadline_s": deadline_s,
        "in_session": bool(request.session),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }


def _admission(x: Exchange) -> dict[str, object]:
    if x.admitted_at is None or x.parsed_at is None:
        return {"verdict": "refused", "reason": x.reason, "detail": x.detail}
    return {"verdict": "admitted", "waited_s": round(x.admitted_at - x.parsed_at, 6)}


def _pick(x: Exchange, pick: Pick) -> dict[str, object]:
    other = runner_up(pick)
    terms = x.before.of(x.asked, pick.kept) if x.before is not None and x.asked is not None else {}
    rows = sorted(zip(pick.scores, pick.kept, strict=True), key=lambda row: -row[0])
    return {
        "policy": pick.reason,
        "endpoint": pick.candidate.endpoint.name,
        "runner_up": None if other is None else other.endpoint.name,
        "candidates": [_candidate(x, score, each, terms) for score, each in rows],
    }


def _candidate(
    x: Exchange, score: float, candidate: Candidate, terms: Mapping[str, Mapping[str, float]]
) -> dict[str, object]:
    shown: dict[str, object] = {"endpoint": candidate.endpoint.name, "score": score}
    asked = x.asked
    if asked is not None and candidate.load.slot < len(asked.cached):
        shown["cached_tokens"] = asked.cached[candidate.load.slot]
    if candidate.endpoint.name in terms:
        shown["terms"] = dict(terms[candidate.endpoint.name])
    return shown
