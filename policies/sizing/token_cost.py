"""Computes dollars per million tokens, and a request's share of the engine seconds of its batch.

Prices are dollars per GPU and hour. All costs are divided by seconds of the engine, so that the
parts add up to what the GPUs cost while they were busy. Idle time is counted separately.
"""

from __future__ import annotations

import msgspec

HOUR_S = 3600.0
MILLION = 1e6


def usd_of(price_hour: float, gpus: int, seconds: float) -> float:
    """Return the dollars that `gpus` GPUs cost for `seconds`, at `price_hour` per GPU and hour."""
    return price_hour * gpus * seconds / HOUR_S


def usd_per_million(price_hour: float, gpus: int, tokens_s: float) -> float:
    """Return the dollars per million tokens.

    price_hour  dollars per GPU and hour
    gpus        number of GPUs
    tokens_s    tokens per second of all GPUs together
    """
    return usd_of(price_hour, gpus, 1.0) / tokens_s * MILLION


def tp_tax(tokens_s_gpu: float, base_tokens_s_gpu: float) -> float:
    """Return by what fraction each GPU generates more tokens per second at a larger TP size.

    tokens_s_gpu       tokens per second and GPU at the larger TP size
    base_tokens_s_gpu  tokens per second and GPU at the smaller one

    The result is usually negative: -0.18 means that each GPU generates 18 % fewer tokens.
    """
    return tokens_s_gpu / base_tokens_s_gpu - 1


class RequestSeconds(msgspec.Struct, frozen=True):
    """How many seconds of an engine's time one request costs, alone or as its share of a batch.

    prompt_tokens  its uncached prompt tokens
    cached_tokens  its cached prompt tokens
    answer_tokens  its generated tokens
    prompt_s       seconds to compute the uncached tokens if no cached ones preceded them
    cached_s       additional seconds because these tokens attend to the cached ones
    answer_s       its share of the decode steps of all its answer tokens
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    prompt_s: float
    cached_s: float
    answer_s: float

    @property
    def total_s(self) -> float:
        """Return the engine seconds of the whole request: prompt, cached part and answer."""
        return self.prompt_s + self.cached_s + self.answer_s


class TokenPrices(msgspec.Struct, frozen=True):
    """The dollars per million tokens of one request, by kind of token.

    prompt  uncached prompt tokens
    cached  cached prompt tokens
    answer  generated tokens

    A price is None if the request has no tokens of that kind.
    """

    prompt: float | None
    cached: float | None
    answer: float | None


def token_prices(use: RequestSeconds, price_hour: float, gpus: int) -> TokenPrices:
    """Return a price for each kind of token of a request. Together they give the request's cost.

    use         the engine seconds of the request
    price_hour  dollars per GPU and hour
    gpus        number of GPUs of the engine
    """

    def price(seconds: float, tokens: int) -> float | None:
        return usd_of(price_hour, gpus, seconds) / tokens * MILLION if tokens else None

    return TokenPrices(
        prompt=price(use.prompt_s, use.prompt_tokens),
        cached=price(use.cached_s, use.cached_tokens),
        answer=price(use.answer_s, use.answer_tokens),
    )


class EngineShare:
    """Divides the busy time of one engine among its running requests, in proportion to weights.

    A request has weight 1 while its prompt is computed, and less while it decodes in a batch. One
    running sum, of seconds per weight, serves all requests, so every event takes constant time.

    busy_s  seconds with a running request
    idle_s  seconds without one
    """

    __slots__ = ("_now_s", "_per_weight_s", "_weight", "busy_s", "idle_s")

    def __init__(self, now_s: float) -> None:
        self._now_s, self._per_weight_s, self._weight = now_s, 0.0, 0.0
        self.busy_s = self.idle_s = 0.0

    def advance(self, now_s: float) -> None:
        """Add the time from the last call to `now_s` to the engine's busy or idle time.

        The time counts as busy if a request was in the engine.
        """
        elapsed = now_s - self._now_s
        if elapsed <= 0:
            return
        self._now_s = now_s
        if self._weight > 0:
            self._per_weight_s += elapsed / self._weight
            self.busy_s += elapsed
        else:
            self.idle_s += elapsed

    def enter(self, now_s: float, weight: float) -> RequestShare:
        """Add a request to the engine at the time `now_s`; return the counter of its time.

        weight  its weight, by which the engine's time is divided among requests

        Raises ValueError if the weight is not positive.
        """
        if weight <= 0:
            raise ValueError(f"the weight of a request must be positive, not {weight}")
        self.advance(now_s)
        self._weight += weight
        return RequestShare(weight, self._per_weight_s)

    def change(self, now_s: float, share: RequestShare, weight: float) -> float:
        """Change a request's weight, and return its engine seconds so far.

        A weight of 0 removes the request from the engine.
        """
        self.advance(now_s)
        share.seconds += share.weight * (self._per_weight_s - share.since)
        self._weight += weight - share.weight
        share.weight, share.since = weight, self._per_weight_s
        if self._weight < 1e-9:  # the last request left: drop the rounding of its predecessors
            self._weight = 0.0
        return share.seconds


class RequestShare:
    """Counts how many seconds of an engine's time one request has used, by its weight.

    It stores the weight, the seconds so far, and the engine's running sum when it started.
    """

    __slots__ = ("seconds", "since", "weight")

    def __init__(self, weight: float, since: float) -> None:
        self.weight, self.since, self.seconds = weight, since, 0.0


def decode_weight(batch: int, context_tokens: float, kv_tokens: float) -> float:
    """Return the weight with which a decoding request shares an engine's time.

    It is the request's share of the batch or of the KV memory, whichever is larger.

    batch           number of decoding requests
    context_tokens  tokens of this request's context
    kv_tokens       KV capacity in tokens

    Prefill has weight 1, because one prompt alone fills a step. A request with a long context
    leaves less KV memory for others, so it pays for that part even if few requests decode.
    """
    return max(1 / max(1, batch), min(1.0, context_tokens / kv_tokens))
