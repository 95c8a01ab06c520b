"""What a prefill costs short answers: those with so few steps that not all prompts meet them.

The prompts of a queue are computed in the order of their arrival, a chunk of tokens per step. So an
answer of five tokens meets at most four chunks, and only of prompts that are close behind its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.engine.running_answer_lengths import WAITING, AgeGroup, StepsLeft

NO_QUEUE = 1e-6
"""Queue in steps of prompts, below which the place of a prompt in it does not matter."""


class LossCurve(Protocol):
    """The loss by a delay: its cube up to `late` budgets, then `overdue` for each further one."""

    @property
    def late(self) -> float: ...
    @property
    def overdue(self) -> float: ...


def harm_of_short(
    group: AgeGroup,
    past: float,
    queue: tuple[float, float, float],
    paces: tuple[float, float],
    curve: LossCurve,
) -> float:
    """Return the loss that a prefill causes to the short answers of one age.

    All times are in budgets of one token.

    group   the answers
    past    the prefills that the answers have had since their first token
    queue   the prefills before this one, this one, and the longest that fits in a step
    paces   the answers' decode step without the request, and with it
    """
    if group[7] == WAITING:
        return _harm_of_queued(group[8], queue, paces, curve.late, curve.overdue)
    return _harm_of_running(group[8], past, queue, paces, curve.late, curve.overdue)


def _harm_of_running(
    answers: Sequence[StepsLeft],
    past: float,
    queue: tuple[float, float, float],
    paces: tuple[float, float],
    late: float,
    overdue: float,
) -> float:
    ahead, work, chunk = queue
    harm = 0.0
    for count, steps, left in answers:
        reach = left * chunk
        if ahead >= reach:  # they end before the prefill begins
            continue
        before, after = paces[0] + (past + ahead) / steps, paces[0] + (past + reach) / steps
        if ahead + work < reach:  # else they end before the request has a first token
            after = paces[1] + (past + ahead + work) / steps
        harm += count * (loss(after, late, overdue) - loss(before, late, overdue))
    return harm


def _harm_of_queued(
    answers: Sequence[StepsLeft],
    queue: tuple[float, float, float],
    paces: tuple[float, float],
    late: float,
    overdue: float,
) -> float:
    # Return the loss of answers whose prompts are anywhere in the queue, each place as probable.
    ahead, work, chunk = queue
    pace = paces[0]
    more = loss(paces[1], late, overdue) - loss(pace, late, overdue)
    begin = _area(pace, pace + chunk, late, overdue)
    harm = 0.0
    for count, steps, _ in answers:
        before, end = ahead / steps, pace + work / steps
        most = pace + chunk  # no step takes longer
        if ahead <= NO_QUEUE * chunk:
            added = loss(min(most, end), late, overdue) - loss(pace, late, overdue)
        else:  # a mean over all places is a difference of areas below the curve
            area = begin - _area(end, most, late, overdue)
            area += _area(end + before, most, late, overdue)
            added = max(0.0, (area - _area(pace + before, most, late, overdue)) / before)
        harm += count * (more + added)
    return harm


def loss(share: float, late: float, overdue: float) -> float:
    """Return the loss by a delay of `share` budgets."""
    if share < late:
        return share * share * share
    return late * late * late + overdue * (share - late)


def _area(share: float, most: float, late: float, overdue: float) -> float:
    # Return the area below the curve from 0 to `share`. From `most` on, the curve is level.
    if share > most:
        return _area(most, most, late, overdue) + (share - most) * loss(most, late, overdue)
    if share < late:
        square = share * share
        return 0.25 * square * square
    beyond = share - late
    return late * late * late * (0.25 * late + beyond) + 0.5 * overdue * beyond * beyond
