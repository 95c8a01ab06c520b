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
    ahead, work, chunk = queue
    pace, after_pace = paces
    late, overdue = curve.late, curve.overdue
    if group[7] == WAITING:
        return _harm_of_queued(group[8], queue, paces, late, overdue)
    harm = 0.0
    for count, steps, left in group[8]:
        reach = left * chunk
        if ahead >= reach:  # they end before the prefill begins
            continue
        before = pace + (past + ahead) / steps
        after = pace + (past + reach) / steps
        if ahead + work < reach:  # else they end before the request has a first token
            after = after_pace + (past + ahead + work) / steps
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
    #
    # One has `ahead` or less behind it before the request, and `work` more after it, divided by its
    # steps. No step takes longer than `most`. The mean loss over all places is a difference of
    # areas below the curve.
    ahead, work, chunk = queue
    pace, after_pace = paces
    most, rest = pace + chunk, loss(pace, late, overdue)
    level, more = loss(most, late, overdue), loss(after_pace, late, overdue) - rest
    full, begin = _area(most, late, overdue), _area(pace, late, overdue)
    harm = 0.0
    for count, steps, _ in answers:
        before, added = pace + ahead / steps, work / steps
        end = pace + added
        if ahead <= NO_QUEUE * chunk:
            harm += count * (more - rest + (level if end > most else loss(end, late, overdue)))
            continue
        area = begin - (_area(end, late, overdue) if end < most else full + (end - most) * level)
        if before >= most:
            area += added * level
        else:
            end, area = before + added, area - _area(before, late, overdue)
            area += _area(end, late, overdue) if end < most else full + (end - most) * level
        harm += count * (more + max(0.0, area * steps / ahead))
    return harm


def loss(share: float, late: float, overdue: float) -> float:
    """Return the loss by a delay of `share` budgets."""
    if share < late:
        return share * share * share
    return late * late * late + overdue * (share - late)


def _area(share: float, late: float, overdue: float) -> float:
    # Return the area below the curve from 0 to `share`.
    if share < late:
        square = share * share
        return 0.25 * square * square
    beyond = share - late
    return late * late * late * (0.25 * late + beyond) + 0.5 * overdue * beyond * beyond
