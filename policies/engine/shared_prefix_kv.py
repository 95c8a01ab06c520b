"""Estimates the KV memory of cached prefixes, of which several sequences may share one copy.

SharedPrefixKv estimates how many tokens are really stored, and how that changes when a sequence is
added or removed. scheduler_model.py counts KV that is not shared. engine_model_updates.py corrects
the estimate by scraped metrics.
"""

from __future__ import annotations


class SharedPrefixKv:
    """Estimates how many tokens of cached prefixes an engine really stores.

    If several sequences have the same prefix, its tokens are stored once.

    tokens    total prefix tokens, as if every sequence had its own copy
    distinct  estimate of the tokens that are really stored. Scraped metrics correct it; `add` and
              `remove` extrapolate it between scrapes
    """

    __slots__ = ("distinct", "tokens")

    def __init__(self) -> None:
        self.tokens, self.distinct = 0, 0.0

    def exclusive_share(self) -> float:
        """Estimate the share (0 to 1) of a sequence's cached prefix that no other sequence uses.

        Only this share becomes free when the sequence ends. If sequences use some of the prefixes
        at random, the result is nearly the square of `distinct / tokens`.
        """
        if self.distinct >= self.tokens:
            return 1.0
        share = self.distinct / self.tokens
        return share * share

    def add(self, tokens: int) -> None:
        """Add a sequence with a cached prefix of `tokens` tokens to the estimate."""
        if tokens:
            self.distinct += self.exclusive_share() * tokens
            self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """Remove a sequence with a cached prefix of `tokens` tokens from the estimate."""
        if tokens:
            self.distinct = max(0.0, self.distinct - self.exclusive_share() * tokens)
            self.tokens -= tokens
        if not self.tokens:
            self.distinct = 0.0
