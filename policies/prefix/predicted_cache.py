"""Predicts how many tokens one endpoint has cached, and when its engine evicts the oldest of them.

Engines do not report evictions, so the prefix index assumes that an engine evicts the least
recently used blocks once its KV memory is full.
"""

from __future__ import annotations

MAX_SLOTS = 1 << 16  # a stamp has the number of an endpoint in its lower bits
_GENERATIONS = 32
_NOTHING = 1e-6  # fewer tokens than this are rounding errors


class PredictedCache:
    """The tokens that one endpoint is predicted to have cached, in up to 32 generations by age.

    A generation is identified by its stamp, a number that grows with time and contains the
    endpoint's slot. The oldest generation is evicted when the tokens exceed the KV capacity.

    stamp            the stamp of the newest generation
    tokens           the number of tokens of each generation, by stamp; oldest first
    held             the total of `tokens`
    capacity_tokens  the engine's KV capacity; None: unknown, nothing is evicted
    evicted          tokens that were evicted
    missed           evicted tokens that were requested again while no endpoint had them cached;
                     `evicted` and `missed` decay over as many evictions as its cache has room for
    reborn           tokens that were evicted before this stamp are not counted in `evicted`
    trust            factor on `capacity_tokens`, below 1 while the engine caches less than assumed
    """

    __slots__ = (
        "capacity_tokens",
        "evicted",
        "held",
        "missed",
        "reborn",
        "stamp",
        "tokens",
        "trust",
    )

    def __init__(self, slot: int) -> None:
        self.stamp = MAX_SLOTS | slot
        self.tokens: dict[int, float] = {self.stamp: 0.0}
        self.held = 0.0
        self.capacity_tokens: float | None = None
        self.trust = 1.0
        self.evicted = self.missed = 0.0
        self.reborn = self.stamp

    def next_generation(self) -> None:
        """Begin a new generation, to which later tokens are added: a group of tokens by age."""
        self.stamp += MAX_SLOTS
        self.tokens[self.stamp] = 0.0

    def empty(self) -> None:
        """Forget all tokens, because the engine was restarted and has lost its cache."""
        self.stamp += MAX_SLOTS
        self.tokens = {self.stamp: 0.0}
        self.held, self.trust = 0.0, 1.0
        self.evicted = self.missed = 0.0
        self.reborn = self.stamp

    def add_tokens(self, tokens: float) -> None:
        """Add `tokens` cached tokens to the newest generation."""
        self.tokens[self.stamp] += tokens
        self.held += tokens

    def remove_tokens(self, stamp: int, tokens: float) -> None:
        """Subtract tokens that are cached no longer, or were used again, from their generation.

        stamp  the generation, a group of tokens of about the same age. An empty one is deleted,
               unless it is the newest or the oldest
        """
        known = self.tokens.get(stamp, 0.0)
        if known - tokens > _NOTHING:
            self.tokens[stamp] = known - tokens
            self.held -= tokens
        elif known:
            self.held -= known
            if stamp == self.stamp or stamp == next(iter(self.tokens)):
                self.tokens[stamp] = 0.0
            else:
                del self.tokens[stamp]

    def oldest_alive(self) -> int:
        """Evict what exceeds the KV capacity; return the stamp of the oldest remaining generation.

        A generation is a group of tokens of about the same age.
        """
        if self.capacity_tokens is not None:
            room = self.capacity_tokens * self.trust
            if self.tokens[self.stamp] * _GENERATIONS > room:
                self.next_generation()
            while self.held > room and len(self.tokens) > 1:
                self._evict(self.tokens.pop(next(iter(self.tokens))), self.capacity_tokens)
        return next(iter(self.tokens))

    def _evict(self, tokens: float, capacity_tokens: float) -> None:
        self.held = max(0.0, self.held - tokens)
        fading = max(0.0, 1.0 - tokens / capacity_tokens) if capacity_tokens > tokens else 0.0
        self.evicted = self.evicted * fading + tokens
        self.missed *= fading

    def regret(self) -> float:
        """Return the share (0 to 1) of evicted tokens that a later request would have needed.

        A few evictions give a low share, because they do little harm.
        """
        if not self.missed or self.capacity_tokens is None:
            return 0.0
        return min(1.0, self.missed / (self.evicted + 0.1 * self.capacity_tokens))
