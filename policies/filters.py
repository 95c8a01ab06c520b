"""Filters: who may be asked at all. Each keeps candidates in order; run.py applies them one after another.

All are strict: when one leaves nobody, nobody is picked, and run.py can say which one it was. What then (wait, shed,
give up) is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, lt

from policies.model import Ask, Candidate

# Nearly always everybody stays. Whether it is so is asked without a step of the interpreter per candidate.
_available = attrgetter("load.available")
_in_flight, _cap = attrgetter("load.in_flight"), attrgetter("endpoint.max_concurrency")


def available(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Neither ejected by health nor draining."""
    if all(map(_available, candidates)):
        return candidates
    return [candidate for candidate in candidates if candidate.load.available]


def untried(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Has not failed this request yet: a retry goes elsewhere or nowhere."""
    if not ask.tried:
        return candidates
    return [candidate for candidate in candidates if candidate.endpoint.name not in ask.tried]


def below_cap(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Has room under its own concurrency cap. A retry was admitted already: it goes over a cap rather than nowhere."""
    if all(map(lt, map(_in_flight, candidates), map(_cap, candidates))):
        return candidates
    below = [candidate for candidate in candidates if candidate.load.in_flight < candidate.endpoint.max_concurrency]
    return below or candidates if ask.tried else below
