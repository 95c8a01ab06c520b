"""Limits the tokens that mirrored requests use in any 60 seconds. No I/O."""

from __future__ import annotations

from collections import deque

MINUTE_S = 60.0


class Spending:
    """Tokens that a mirror has taken from its budget for one request.

    They are an upper bound; settle() returns those that were not used.

    at_s    time at which the tokens were taken, on the clock of the budget's caller
    tokens  number of tokens that count against the budget
    """

    __slots__ = ("at_s", "tokens")

    def __init__(self, at_s: float, tokens: int) -> None:
        self.at_s, self.tokens = at_s, tokens


class TokenBudget:
    """A budget of at most `per_minute` tokens in any 60 seconds.

    The caller passes the time in seconds, which must not decrease.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._spent: deque[Spending] = deque()
        self._sum = 0

    def try_take(self, tokens: int, now_s: float) -> Spending | None:
        """Take tokens from the budget. Returns None and changes nothing if too few are left."""
        while self._spent and self._spent[0].at_s <= now_s - MINUTE_S:
            self._sum -= self._spent.popleft().tokens
        tokens = max(1, tokens)
        if self._sum + tokens > self._per_minute:
            return None
        spending = Spending(now_s, tokens)
        self._spent.append(spending)
        self._sum += tokens
        return spending

    def settle(self, spending: Spending, used: int) -> None:
        """Put the tokens that were taken but not used back into the budget.

        `used` tokens were used. If that is at least the number taken, the budget does not change.
        """
        unused = spending.tokens - max(1, used)
        if unused > 0 and self._spent and spending.at_s >= self._spent[0].at_s:
            spending.tokens -= unused
            self._sum -= unused
