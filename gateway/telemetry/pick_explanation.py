"""Explains why a request went to its endpoint, for the newest requests, which are kept in memory.

The state at the pick and at the end of each request is recorded. From these records, the
explanation of a request is built as plain values; admin/ serves it over HTTP. The routing policy
defines the parts of a score (policies.policy_types.PriceTermsFunction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.request_record import Exchange, SplitRecord
from policies.load_snapshot import LoadSnapshot
from policies.policy_types import Policy, PriceTermsFunction
from policies.routing_types import Candidate, Pick, RoutingQuery

NEXT_BEST = 2
"""Number of candidates besides the picked one whose load is recorded.

A pick does not complete the price of a candidate that cannot be the cheapest, so the one with the
next best score need not be the next best one.
"""


class PickSnapshot(msgspec.Struct, frozen=True):
    """The loads of the picked and the next best endpoints at a pick, to explain the pick later.

    The loads are those from before capacity was reserved. Only these endpoints are recorded,
    because recording all candidates would take as long as the pick.

    Learned speeds are not recorded, nor the loads of other ranks of the same engine. An explanation
    that needs these values uses the current ones.

    terms       function of the policy that computes the parts (terms) of each candidate's score
    candidates  the picked candidate and the next best ones, each with its load at the pick
    """

    terms: PriceTermsFunction
    candidates: tuple[tuple[Candidate, LoadSnapshot], ...]

    def score_terms(
        self, query: RoutingQuery, candidates: Sequence[Candidate]
    ) -> Mapping[str, Mapping[str, float]]:
        """Compute the parts (terms) of the recorded candidates' scores, from their recorded load.

        The result maps an endpoint's name to the values of its terms by name.

        query       the policy's input at the pick
        candidates  all candidates of the pick
        """
        then = {
            id(candidate): Candidate(candidate.endpoint, snapshot.restore(candidate.load))
            for candidate, snapshot in self.candidates
        }
        all_terms = self.terms(
            query, [then.get(id(candidate), candidate) for candidate in candidates]
        )
        return {
            candidate.endpoint.name: terms
            for candidate, terms in zip(candidates, all_terms, strict=True)
            if id(candidate) in then
        }


def snapshot_pick(policy: Policy, pick: Pick) -> PickSnapshot | None:
    """Record the load of the picked endpoint and of the next best ones, to explain the pick later.

    Call it before capacity is reserved. The result is None if the policy's scores have no parts
    that could be shown.
    """
    if policy.price_terms is None:
        return None
    recorded = (pick.candidate, *next_best(pick))
    return PickSnapshot(
        policy.price_terms,
        tuple([(candidate, LoadSnapshot(candidate.load)) for candidate in recorded]),
    )


def next_best(pick: Pick) -> list[Candidate]:
    """Return the candidates with the best scores apart from the picked one, best first.

    There are at most NEXT_BEST of them.
    """
    candidates, scores, picked = pick.candidates, pick.scores, pick.candidate
    # Sorting in C takes less than searching the best one several times.
    ranks = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: NEXT_BEST + 1]
    best = [candidates[rank] for rank in ranks if candidates[rank] is not picked]
    return best[:NEXT_BEST]


def as_json(exchange: Exchange) -> dict[str, object]:
    """Return the explanation of a request as JSON-compatible values.

    It has the candidates, their scores and the outcome.
    """
    return {
        "id": exchange.id,
        "trace_id": None if exchange.trace is None else exchange.trace.trace_id,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "model": exchange.model,
        "tier": exchange.tier or None,
        "api": exchange.api.path,
        "engine_api": _engine_api(exchange),
        "tenant": exchange.tenant,
        **_request(exchange),
        "admission": _admission(exchange),
        "pick": None if exchange.pick is None else _pick(exchange, exchange.pick),
        "retries": exchange.retries,
        "split": _split(exchange.split),
        "pull": _pull(exchange.split),
        "predicted": {"ttft_s": exchange.predicted_ttft_s, "tpot_s": exchange.predicted_tpot_s},
        "actual": {"ttft_s": exchange.ttft_s, "tpot_s": exchange.tpot_s},
        "slo_outcome": exchange.slo_outcome or None,
    }


def _split(split: SplitRecord | None) -> dict[str, object] | None:
    return None if split is None else {"reason": split.reason, "prefill": split.prefill}


def _pull(split: SplitRecord | None) -> dict[str, object] | None:
    # The seconds are those until the source has offered its KV; None: it has not.
    if split is None or not split.pulled_from:
        return None
    began, done = split.prefill_sent_at, split.prefilled_at
    return {
        "source": split.pulled_from,
        "tokens": split.pulled_tokens,
        "offered_s": None if began is None or done is None else done - began,
    }


def _engine_api(exchange: Exchange) -> dict[str, str] | None:
    # Return by which API engines were asked and why, where a translation was considered.
    if exchange.call is None or not exchange.translation_reason:
        return None
    return {"path": exchange.call.api.path, "reason": exchange.translation_reason}


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
        "session_source": request.session_source,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }


def _admission(exchange: Exchange) -> dict[str, object]:
    if exchange.admitted_at is None or exchange.parsed_at is None:
        return {"verdict": "refused", "reason": exchange.reason, "detail": exchange.detail}
    waited_s = exchange.admitted_at - exchange.parsed_at
    return {"verdict": "admitted", "waited_s": round(waited_s, 6)}


def _pick(exchange: Exchange, pick: Pick) -> dict[str, object]:
    terms: Mapping[str, Mapping[str, float]] = {}
    if exchange.pick_snapshot is not None and exchange.first_query is not None:
        terms = exchange.pick_snapshot.score_terms(exchange.first_query, pick.candidates)
    rows = sorted(
        [
            (_complete_score(pick, candidate, score, terms), candidate)
            for score, candidate in zip(pick.scores, pick.candidates, strict=True)
        ],
        key=lambda row: (row[1] is not pick.candidate, -row[0]),
    )
    recorded = next_best(pick)
    other = next((candidate for _, candidate in rows if candidate in recorded), None)
    return {
        "policy": pick.reason,
        "endpoint": pick.candidate.endpoint.name,
        "runner_up": None if other is None else other.endpoint.name,
        "candidates": [_candidate(exchange, score, candidate, terms) for score, candidate in rows],
    }


def _complete_score(
    pick: Pick,
    candidate: Candidate,
    score: float,
    terms: Mapping[str, Mapping[str, float]],
) -> float:
    # Return the score with the terms that the pick left out because they could not change it.
    if candidate is pick.candidate or candidate.endpoint.name not in terms:
        return score
    return -sum(terms[candidate.endpoint.name].values())


def _candidate(
    exchange: Exchange,
    score: float,
    candidate: Candidate,
    terms: Mapping[str, Mapping[str, float]],
) -> dict[str, object]:
    row: dict[str, object] = {"endpoint": candidate.endpoint.name, "score": score}
    query = exchange.first_query
    if query is not None and candidate.load.slot < len(query.cached_by_slot):
        row["cached_tokens"] = query.cached_by_slot[candidate.load.slot]
    if candidate.endpoint.name in terms:
        row["terms"] = dict(terms[candidate.endpoint.name])
    return row
