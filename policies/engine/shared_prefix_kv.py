"""KV of cached prefixes in the engine model, where several sequences may share one copy.

Contains how much of it is really stored, and how one sequence more or less changes that. Unshared
KV is in engine_model.py; the correction by scrapes is in engine_timeline.py.
"""

from __future__ import annotations


class SharedPrefixKv:
    """The cached prefixes of all prompts that have KV now.

    tokens    their total length, as if every sequence had its own copy
    distinct  what is really stored of it: corrected by scrapes, and extrapolated between them
    """

    __slots__ = ("distinct", "tokens")

    def __init__(self) -> None:
        self.tokens, self.distinct = 0, 0.0

    def exclusive_share(self) -> float:
        """Return the share of a prefix that only one sequence uses.

        If sequences use some prefixes at random, it is nearly the square of `distinct / tokens`.
        """
        if self.distinct >= self.tokens:
            return 1.0
        share = self.distinct / self.tokens
        return share * share

    def add(self, tokens: int) -> None:
        """Add a sequence with a prefix of this many tokens."""
        self.distinct += self.exclusive_share() * tokens
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """Remove a sequence with a prefix of this many tokens."""
        self.distinct = max(0.0, self.distinct - self.exclusive_share() * tokens)
        self.tokens -= tokens
        if not self.tokens:
            self.distinct = 0.0
