"""Running averages of one engine: how much it has computed lately, and how much was sent to it.

Values and their updates only. They are read by outlook.py and foresight.py.
"""

from __future__ import annotations

from math import exp, inf

RATE_S = 20.0  # over how long the prompt tokens computed are averaged
SHARE_S = 120.0  # over how long the share of the time that prompts take is averaged
ARRIVALS_S = 20.0  # over how long arrivals are averaged
BEHIND = 0.7  # of what usually arrives, what is sent behind a prompt that waits: routing sends some elsewhere
UNLIKELY = 0.5  # of the prompts expected in the mean, what is left out: most prompts meet fewer than the mean
LEAST_ARRIVALS, LEAST_S = 3.0, 1.0  # prompts in that average, and seconds, for it to tell anything


class Averages:
    """What an engine has been doing lately, on paper.

    rate         prompt tokens computed per second, over RATE_S
    share, pace  of the time, what steps with prompts take; how many of them there are per second; over SHARE_S
    """

    __slots__ = ("at", "born", "pace", "rate", "seen_s", "seen_steps", "share")

    def __init__(self, now: float) -> None:
        self.at, self.born = now, inf
        self.rate = self.share = self.pace = self.seen_s = 0.0
        self.seen_steps = 0

    def update(self, planned: int, prefill_s: float, prefill_steps: int, now: float) -> None:
        """Count what was planned and computed since the last time."""
        passed = now - self.at
        kept = exp(-passed / RATE_S)
        self.rate = self.rate * kept + planned * (1.0 - kept) / passed
        self.at = now
        if self.born < now:
            gain = min(1.0, passed / min(SHARE_S, now - self.born))
            self.share += gain * ((prefill_s - self.seen_s) / passed - self.share)
            self.pace += gain * ((prefill_steps - self.seen_steps) / passed - self.pace)
        else:
            self.born = now
        self.seen_s, self.seen_steps = prefill_s, prefill_steps


class Arrivals:
    """What has been sent to an endpoint lately, over ARRIVALS_S: prompts, their tokens to compute, and in what time."""

    __slots__ = ("at", "prompts", "seconds", "tokens")

    def __init__(self, now: float) -> None:
        self.at, self.prompts, self.tokens, self.seconds = now, 0.0, 0.0, 0.0

    def came(self, tokens: int, now: float) -> None:
        """One more prompt."""
        kept = exp((self.at - now) / ARRIVALS_S)
        self.at, self.seconds = now, self.seconds * kept + ARRIVALS_S * (1.0 - kept)
        self.prompts, self.tokens = self.prompts * kept + 1.0, self.tokens * kept + tokens

    def behind(self, seconds: float) -> float:
        """Prompt tokens that will be sent within so many seconds behind a prompt that waits; nearer the median than the
        mean, for a few prompts meet many."""
        if self.prompts < LEAST_ARRIVALS or self.seconds < LEAST_S:
            return 0.0
        prompts = BEHIND * seconds * self.prompts / self.seconds - UNLIKELY
        return prompts * self.tokens / self.prompts if prompts > 0.0 else 0.0
