"""Learns how many tokens an engine computes per step, where its label is wrong or missing.

First tokens show bounds of that number (EngineModel). BudgetLessons decides from several steps.
"""

from __future__ import annotations

LESSONS = 3
"""Number of steps that must contradict the present budget, less those that agree with it."""

LEAST_BUDGET, MOST_BUDGET = 256, 1 << 17
"""Range of budgets that can be learned, in tokens per step."""


class BudgetLessons:
    """What recent steps have shown about the token budget of an engine's steps.

    score   number of steps that contradict the budget, less those that agree: above 0, steps were
            larger, below 0 smaller
    tokens  the bound that these steps have shown: the least of lower bounds, or the greatest of
            upper ones
    """

    __slots__ = ("score", "tokens")

    def __init__(self) -> None:
        self.score, self.tokens = 0, 0

    def add_larger(self, tokens: int) -> None:
        """Add a step that had at least `tokens` tokens, more than the budget."""
        self.tokens = min(self.tokens, tokens) if self.score > 0 else tokens
        self.score = max(self.score, 0) + 1

    def add_smaller(self, tokens: int) -> None:
        """Add a step that had no room for more than `tokens` tokens, less than the budget."""
        self.tokens = max(self.tokens, tokens) if self.score < 0 else tokens
        self.score = min(self.score, 0) - 1

    def add_equal(self) -> None:
        """Add a step that agrees with the budget."""
        if self.score:
            self.score += 1 if self.score < 0 else -1

    def correct(self, budget_tokens: int) -> int:
        """Return the budget that follows from these steps, and forget them if it is another one.

        It is the power of two next to the bound: above a lower one, below an upper one.
        """
        if abs(self.score) < LESSONS:
            return budget_tokens
        exponent = self.tokens.bit_length() - 1
        if self.score > 0 and self.tokens > 1 << exponent:
            exponent += 1
        self.score = 0
        return max(LEAST_BUDGET, min(MOST_BUDGET, 1 << exponent))
