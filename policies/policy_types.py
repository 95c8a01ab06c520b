"""The type Policy and its parts: filters, weighted scorers, ranking, picker.

The class Policy combines them. To add a rule, write a function in filters.py, scorers.py or
pickers.py, and one line in builtin_policies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, RoutingQuery

Filter = Callable[[RoutingQuery, Sequence[Candidate]], Sequence[Candidate]]
"""A function that returns some of the candidates, in their order.

It may return its argument, and never changes it.
"""


class RetryFilter:
    """A filter that applies only to retries. At a first attempt, it keeps all candidates."""

    __slots__ = ("__name__", "_keep")

    def __init__(self, keep: Filter) -> None:
        self._keep = keep
        self.__name__ = str(getattr(keep, "__name__", type(keep).__name__))

    def __call__(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return self._keep(query, candidates) if query.failed_endpoints else candidates


Scorer = Callable[[RoutingQuery, Sequence[Candidate]], list[float]]
"""A function that returns a score for every candidate, in their order; a higher score is better.

It returns a list rather than a dict because it runs for every request.
"""

Picker = Callable[[RoutingQuery, Sequence[Candidate], Sequence[float]], int]
"""A function that returns the index of the chosen candidate.

Its arguments are the query, the candidates and their scores. Only pickers may use the random
generator `query.rng`.
"""


PriceTermsFunction = Callable[[RoutingQuery, Sequence[Candidate]], Sequence[Mapping[str, float]]]
"""A function that returns the named parts of each candidate's cost, in order.

It is called only to explain a pick, so it may be slow.
"""


class LinkLoad(NamedTuple):
    """How busy one direction of an endpoint's network link is with transfers of KV cache.

    waiting    number of transfers that have not ended
    wait_s     seconds until they will have ended
    service_s  seconds for which one more transfer would occupy the link
    """

    waiting: int
    wait_s: float
    service_s: float


class PhaseShare(msgspec.Struct, frozen=True):
    """Which part of a request an endpoint would serve: its prefill, its decoding, or both.

    prefills     1.0 if the endpoint computes the prompt, else 0.0
    decodes      1.0 if the endpoint generates the answer, else 0.0
    transfer_s   seconds from the end of the prefill until its KV has arrived at the decode endpoint
    transfers_s  transfer_s of each candidate, in order; empty: `transfer_s` holds for all
    link_loads   for each candidate, the loads of the two links that its KV would use; empty: none
    """

    prefills: float = 1.0
    decodes: float = 1.0
    transfer_s: float = 0.0
    transfers_s: Sequence[float] = ()
    link_loads: Sequence[tuple[LinkLoad, LinkLoad]] = ()


WHOLE_REQUEST, DECODE_PHASE = PhaseShare(), PhaseShare(prefills=0.0)

PhasePrices = Callable[[RoutingQuery, Sequence[Candidate], PhaseShare], list[float]]
"""A function that returns the cost of serving some phases of a request at each candidate, in order.

Lower is better. The costs of two phases can be added.
"""


class Ranking(msgspec.Struct, frozen=True):
    """How a routing policy keeps many endpoints sorted, so that a pick needs to score only a few.

    At a pick, the policy scores a shortlist: the candidates that have most of the prompt cached,
    and the best of the others by this ranking. The shortlist contains the candidate that a scan of
    all would pick, if the policy's score has these properties:

    1. Apart from `now`, a score depends only on the request, on the candidate's load, and on the
       tokens that this candidate and the best one have cached. A score does not rise when fewer
       tokens are cached.
    2. Of two candidates of one group with equally many tokens cached, the one with the lower key
       never scores lower. With equal keys, a candidate of a lower group never scores lower.
    3. Every change of a key, of a group, of a filter's result, or of what `is_settled` and
       `is_certain` return marks the load (`mark_changed`).

    If property 2 is only approximate, as for forecasts that depend on the prompt's length, `depth`
    candidates per group are scored. The error of a pick is then at most the error of the key.

    key         function of candidate and `now`: its cost without the request; lower is better
    group       function of a load: the number of its group, such as requests in flight; None: all
                candidates are one group
    is_settled  function of a load: whether property 2 holds exactly for it; None: it always does.
                Other candidates are scored in addition, at most SHORTLIST_UNSETTLED per group
    depth       number of settled candidates to score, per group and per number of cached tokens
    is_certain  function of a load: whether property 2 is nearly exact for it, so that it counts as
                `depth` candidates. None: for none, if `depth` is above 1
    rises       function of a load and `now`: whether its key may have risen without a recorded
                change, as for an engine whose first token is late. Such candidates are ranked again
                if they are among the best. None: no key rises like that. A key that falls with time
                needs no such function, because the candidate is only found later
    tests       function of all candidates: the indexes of those that rank low only because of a
                label, which may be wrong. While they are idle, one of them in turn is scored in
                addition, so that the policy may test it with a request. None: there are none
    is_tested   function of a load: whether the endpoint needs no such test any more
    """

    key: Callable[[Candidate, float], float]
    group: Callable[[EndpointLoad], int] | None = None
    is_settled: Callable[[EndpointLoad], bool] | None = None
    depth: int = 1
    is_certain: Callable[[EndpointLoad], bool] | None = None
    rises: Callable[[EndpointLoad, float], bool] | None = None
    tests: Callable[[Sequence[Candidate]], list[int]] | None = None
    is_tested: Callable[[EndpointLoad], bool] | None = None


class WeightedScorer(msgspec.Struct, frozen=True):
    """A scorer of a routing policy, and the weight by which its score is multiplied."""

    scorer: Scorer
    weight: float = 1.0


def weighted_sum(scorers: tuple[WeightedScorer, ...]) -> Scorer:
    """Return a scorer that returns the weighted sum of several scorers.

    A single scorer with weight 1 is returned unchanged.
    """
    if len(scorers) == 1 and scorers[0].weight == 1.0:
        return scorers[0].scorer

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        total = [0.0] * len(candidates)
        for weighted in scorers:
            scores = weighted.scorer(query, candidates)
            total = [
                subtotal + score * weighted.weight
                for subtotal, score in zip(total, scores, strict=True)
            ]
        return total

    return score


class Policy(msgspec.Struct, frozen=True):
    """A routing policy: filters, then weighted scorers, then a picker.

    reads_prefix    whether the gateway must compute the prefix hashes of prompts for it
    reads_forecast  whether it reads the learned speed, engine model or forecast of an EndpointLoad;
                    they are updated only if some policy reads them
    price_terms     function that returns the named parts of each candidate's score, to explain a
                    pick; None: the score has no parts
    phase_prices    function that prices prefill and decode separately, so that the policy can also
                    decide whether to split a request (policies/pricing/split_decision.py); None: it
                    cannot
    ranking         how to keep the candidates of a large pool sorted; None: every pick scores all

    `score` (the weighted sum of all scorers) and `first_attempt_filters` are derived from the other
    fields.
    """

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[WeightedScorer, ...]
    picker: Picker
    reads_prefix: bool = False
    reads_forecast: bool = False
    price_terms: PriceTermsFunction | None = None
    phase_prices: PhasePrices | None = None
    ranking: Ranking | None = None
    score: Scorer = weighted_sum(())
    first_attempt_filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        first = tuple(filter_ for filter_ in self.filters if not isinstance(filter_, RetryFilter))
        msgspec.structs.force_setattr(self, "first_attempt_filters", first)
        msgspec.structs.force_setattr(self, "score", weighted_sum(self.scorers))
