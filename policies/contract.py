"""The three seams of a policy: filters keep, scorers rate, a picker chooses.

A new rule is a new function among its sisters (filters.py, scorers.py, pickers.py) and a line in presets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from policies.model import Ask, Candidate

Filter = Callable[[Ask, Sequence[Candidate]], Sequence[Candidate]]
"""Keeps some of the candidates, in order. May return its argument unchanged; never mutates it."""


class RetryFilter:
    """A filter for retries: it keeps all candidates while no endpoint was tried, and is not asked then."""

    __slots__ = ("__name__", "_keep")

    def __init__(self, keep: Filter) -> None:
        self._keep = keep
        self.__name__ = str(getattr(keep, "__name__", type(keep).__name__))

    def __call__(self, ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return self._keep(ask, candidates) if ask.tried else candidates


Scorer = Callable[[Ask, Sequence[Candidate]], list[float]]
"""Rates every candidate, aligned with the argument; higher is better. A list, not a dict: this is a hot path."""

Picker = Callable[[Ask, Sequence[Candidate], Sequence[float]], int]
"""Chooses an index into the candidates. Only pickers may use `ask.rng`."""


Terms = Callable[[Ask, Sequence[Candidate]], Sequence[Mapping[str, float]]]
"""The parts of what each candidate would cost, by name, aligned. For explaining a pick, so it need not be fast."""


class Part(msgspec.Struct, frozen=True):
    """What of a request an endpoint would do: 1 or 0 each.

    transfer_s  seconds from the end of its prefill until the KV is where it will be decoded
    """

    prefills: float = 1.0
    decodes: float = 1.0
    transfer_s: float = 0.0


WHOLE, DECODE = Part(), Part(prefills=0.0)

PartPrices = Callable[[Ask, Sequence[Candidate], Part], list[float]]
"""What doing a part of the request would cost at each candidate, aligned; lower is better. Parts' prices add up."""


class Weighted(msgspec.Struct, frozen=True):
    """A scorer and what one unit of its score is worth."""

    scorer: Scorer
    weight: float = 1.0


def together(scorers: tuple[Weighted, ...]) -> Scorer:
    """The weighted sum of what they say. One alone that counts in full is asked itself."""
    if len(scorers) == 1 and scorers[0].weight == 1.0:
        return scorers[0].scorer

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        total = [0.0] * len(candidates)
        for part in scorers:
            said = part.scorer(ask, candidates)
            total = [sum_ + score * part.weight for sum_, score in zip(total, said, strict=True)]
        return total

    return score


class Policy(msgspec.Struct, frozen=True):
    """Filters, then weighted scorers, then a picker. `reads_prefix` asks the line to fingerprint prompts for it.

    `first_filters` are those of a first attempt, and `score` is what all scorers say together; both follow from the
    other fields, whatever is given.
    `reads_beliefs` says that it looks at belief, timeline or outlook of an EndpointLoad: elsewhere these rest.
    `terms` names the parts of each candidate's score, for a policy that reads beliefs and can say more than a number.
    `parts` prices halves of a request, for a policy that can also decide whether to split it (split.py).
    """

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[Weighted, ...]
    picker: Picker
    reads_prefix: bool = False
    reads_beliefs: bool = False
    terms: Terms | None = None
    parts: PartPrices | None = None
    score: Scorer = together(())
    first_filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        first = tuple(keep for keep in self.filters if not isinstance(keep, RetryFilter))
        msgspec.structs.force_setattr(self, "first_filters", first)
        msgspec.structs.force_setattr(self, "score", together(self.scorers))
