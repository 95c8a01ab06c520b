"""Decaying means of an engine's recent steps, and of the prompts that were recently sent to it.

load_forecast.py and ttft_simulation.py read them.
"""

from __future__ import annotations

from math import exp, inf

RATE_S = 20.0  # averaging time of computed prompt tokens
SHARE_S = 120.0  # averaging time of the share of steps with prompts
ARRIVALS_S = 20.0  # averaging time of arrivals
# Share of new prompts that routing still sends to an endpoint while a prompt waits there.
BEHIND = 0.7
UNLIKELY = 0.5  # subtracted from the expected number of prompts, since the median is below the mean
LEAST_ARRIVALS, LEAST_S = 3.0, 1.0  # prompts and seconds that a prediction of arrivals needs


class EngineAverages:
    """Computes decaying means of an engine's recent work, as its model predicts it.

    rate   prompt tokens computed per second, as a mean over RATE_S seconds
    share  fraction (0 to 1) of time in steps with prompts, as a mean over SHARE_S seconds
    pace   steps with prompts per second, as a mean over SHARE_S seconds
    """

    __slots__ = ("at", "first_event_at", "pace", "rate", "seen_s", "seen_steps", "share")

    def __init__(self, now: float) -> None:
        self.at, self.first_event_at = now, inf
        self.rate = self.share = self.pace = self.seen_s = 0.0
        self.seen_steps = 0

    def update(self, planned: int, prefill_s: float, prefill_steps: int, now: float) -> None:
        """Add the work that the engine model has simulated since the last update to the means.

        planned        prompt tokens computed since then
        prefill_s      total seconds of steps with prompts since the start
        prefill_steps  total number of these steps
        now            the time in seconds
        """
        passed = now - self.at
        decay = exp(-passed / RATE_S)
        self.rate = self.rate * decay + planned * (1.0 - decay) / passed
        self.at = now
        if self.first_event_at < now:
            gain = min(1.0, passed / min(SHARE_S, now - self.first_event_at))
            self.share += gain * ((prefill_s - self.seen_s) / passed - self.share)
            self.pace += gain * ((prefill_steps - self.seen_steps) / passed - self.pace)
        else:
            self.first_event_at = now
        self.seen_s, self.seen_steps = prefill_s, prefill_steps


class ArrivalAverages:
    """Running means of the prompts recently sent to an endpoint.

    Older prompts count less; the time constant is ARRIVALS_S seconds.

    prompts  decayed number of prompts
    tokens   decayed number of the prompts' uncached tokens
    seconds  decayed time in which these prompts arrived
    """

    __slots__ = ("at", "prompts", "seconds", "tokens")

    def __init__(self, now: float) -> None:
        self.at, self.prompts, self.tokens, self.seconds = now, 0.0, 0.0, 0.0

    def record(self, tokens: int, now: float) -> None:
        decay = exp((self.at - now) / ARRIVALS_S)
        self.at, self.seconds = now, self.seconds * decay + ARRIVALS_S * (1.0 - decay)
        self.prompts, self.tokens = self.prompts * decay + 1.0, self.tokens * decay + tokens

    def expected_tokens_behind(self, seconds: float) -> float:
        """Return how many prompt tokens are expected to arrive behind a waiting prompt in
        `seconds`.

        The result is closer to the median than to the mean, because a few prompts have many others
        behind them.
        """
        if self.prompts < LEAST_ARRIVALS or self.seconds < LEAST_S:
            return 0.0
        prompts = BEHIND * seconds * self.prompts / self.seconds - UNLIKELY
        return prompts * self.tokens / self.prompts if prompts > 0.0 else 0.0
