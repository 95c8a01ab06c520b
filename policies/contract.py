"""The three seams of a policy: filters keep, scorers rate, a picker chooses.

A new rule is a new function among its sisters (filters.py, scorers.py, pickers.py) and a line in presets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from policies.model import Ask, Candidate

Filter = Callable[[Ask, Sequence[Candidate]], Sequence[Candidate]]
"""Keeps some of the candidates, in order. May return its argument unchanged; never mutates it."""

Scorer = Callable[[Ask, Sequence[Candidate]], list[float]]
"""Rates every candidate, aligned with the argument; higher is better. A list, not a dict: this is a hot path."""

Picker = Callable[[Ask, Sequence[Candidate], Sequence[float]], int]
"""Chooses an index into the candidates. Only pickers may use `ask.rng`."""


Terms = Callable[[Ask, Sequence[Candidate]], Sequence[Mapping[str, float]]]
"""The parts of what each candidate would cost, by name, aligned. For explaining a pick, so it need not be fast."""


class Weighted(msgspec.Struct, frozen=True):
    """A scorer and what one unit of its score is worth."""

    scorer: Scorer
    weight: float = 1.0


class Policy(msgspec.Struct, frozen=True):
    """Filters, then weighted scorers, then a picker. `reads_prefix` asks the line to fingerprint prompts for it.

    `terms` names the parts of each candidate's score, for a policy that can say more than a number about its picks.
    """

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[Weighted, ...]
    picker: Picker
    reads_prefix: bool = False
    terms: Terms | None = None
