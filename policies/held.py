"""KV of one engine on paper that prefixes take, where several sequences may have the same one.

Lives here: how much of it there is really, and what one more or one less makes of that. Not here: what sequences hold
alone (paper.py), how the engine tells (lessons.py).
"""

from __future__ import annotations


class Prefixes:
    """What was cached of the prompts that hold KV now.

    tokens    of all these prompts together, as if every sequence had a copy
    distinct  of it, what is really held: told by the engine's scrapes, and moved on from one to the next
    """

    __slots__ = ("distinct", "tokens")

    def __init__(self) -> None:
        self.tokens, self.distinct = 0, 0.0

    def alone(self) -> float:
        """Share of a prefix that comes or goes with one sequence, for nobody else has it.

        Of sequences that have one of some prefixes at random it is nearly the square of `distinct / tokens`.
        """
        if self.distinct >= self.tokens:
            return 1.0
        share = self.distinct / self.tokens
        return share * share

    def hold(self, tokens: int) -> None:
        """One more sequence has a prefix of so many tokens."""
        self.distinct += self.alone() * tokens
        self.tokens += tokens

    def release(self, tokens: int) -> None:
        """One that had so many is over."""
        self.distinct = max(0.0, self.distinct - self.alone() * tokens)
        self.tokens -= tokens
        if not self.tokens:
            self.distinct = 0.0
