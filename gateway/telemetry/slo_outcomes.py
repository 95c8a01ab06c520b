"""Measures whether ended requests met their latency targets (SLO), and how good predictions were.

It computes the outcome that admission control learns from, and updates the metrics of SLOs and
predictions. All other metrics per request are in accounting.py.
"""

from __future__ import annotations

from time import monotonic

from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import Counter
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from policies.admission.admission_policy import RequestOutcome
from policies.admission.prompt_length_correction import PromptLengths, is_text
from policies.engine.output_length import OutputLengths
from policies.latency.expected_latency import ttfts
from policies.prefix.prefix_match import longest_match
from policies.routing_types import Pick, RoutingQuery, Slo

FAILED = "failed"
TRUNCATED_REASONS = frozenset(
    (None, "length", "abort", "error", "max_tokens", "incomplete", "failed", "cancelled")
)
"""Finish reasons of responses that were cut off, so that their natural length is unknown."""
LEARN_SINGLY, LEARN_BATCH = 16, 8
"""How many responses one update of the estimates learns from.

LEARN_SINGLY  number of first responses of a kind, each of which updates the estimates
LEARN_BATCH   number of responses per later update, which costs less
"""
MAX_KINDS = 8192
REGRET_SAMPLE_EVERY = 32
"""Every 32nd pick is compared with the fastest candidate; the comparison is too slow for each."""


WITHDRAWN = frozenset(("client_gone", "preempted"))
"""Outcomes of requests whose client or batch stopped waiting for them."""


def admission_outcome(exchange: Exchange) -> RequestOutcome:
    """Return how an admitted request ended, as input for admission control.

    The status is "ignored" if the client left, or if the engine rejected the request as invalid.
    Such a request shows nothing about the load.
    """
    now, relay = monotonic(), exchange.relay
    if relay is None or not relay.is_committed:
        is_neutral = exchange.outcome in WITHDRAWN or exchange.reason == "engine"
        return RequestOutcome(now, status="ignored" if is_neutral else "dropped")
    usage = effective_usage(exchange, relay)
    ttft_s, tpot_s = measure_latency(exchange, relay, usage)
    ended = "dropped"
    if exchange.outcome == "served":
        ended = "served"
    elif exchange.outcome in WITHDRAWN:
        ended = "ignored"
    tokens = _output_tokens(exchange, relay, usage)
    return RequestOutcome(now, ttft_s, tpot_s, tokens, usage.cached_tokens, ended)


def _output_tokens(exchange: Exchange, relay: Relay, usage: TokenUsage) -> int:
    # Return the output tokens as reported or counted, or else the estimate.
    #
    # Without the estimate, an engine that reports no counts would refund the tenant's whole quota.
    if usage.completion_tokens is None and not relay.event_count and exchange.call is not None:
        return exchange.call.request.output_tokens
    return usage.completion_tokens or relay.event_count


def effective_usage(exchange: Exchange, relay: Relay) -> TokenUsage:
    """Return the token counts of an answer, with the right number of cached prompt tokens.

    For a split request, that is the prefill endpoint's number. The decode endpoint counts
    transferred KV as cached.
    """
    usage, split = relay.usage, exchange.split
    if split is None or split.cached_tokens is None:
        return usage
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens, split.cached_tokens)


def measure_latency(
    exchange: Exchange, relay: Relay, usage: TokenUsage
) -> tuple[float | None, float | None]:
    """Return the time to first token and the time per further token of an answer, in seconds.

    Each of the two is None if it cannot be measured.
    """
    first, last = relay.first_token_at, relay.last_data_at
    received = exchange.received_at
    if first is None or last is None or received is None:
        return None, None
    tokens = usage.completion_tokens or relay.event_count - 2
    tpot_s = (last - first) / (tokens - 1) if relay.event_count and tokens > 1 else None
    return first - received, tpot_s


def stream_outcome(slo: Slo, ttft_s: float, tpot_s: float | None) -> str:
    """Return whether a streamed response met its latency targets.

    The result is "met", "ttft_missed", "tpot_missed" or "both_missed".

    ttft_s  measured seconds to the first token
    tpot_s  measured seconds per further token; None (fewer than two tokens) meets every target
    """
    if tpot_s is None or tpot_s <= slo.tpot_s:
        return "met" if ttft_s <= slo.ttft_s else "ttft_missed"
    return "tpot_missed" if ttft_s <= slo.ttft_s else "both_missed"


def whole_outcome(slo: Slo, ttft_s: float, tokens: int) -> str:
    """Return whether a response that is not streamed met its latency targets.

    The result is "met" if the response began within the target for the first token plus the target
    for each further token; otherwise it is "ttft_missed". The engine has generated all tokens by
    then.

    ttft_s  measured seconds to the first byte of the response
    tokens  number of output tokens
    """
    budget_s = slo.ttft_s + slo.tpot_s * (tokens - 1 if tokens > 1 else 0)
    return "met" if ttft_s <= budget_s else "ttft_missed"


KindKey = tuple[str, str, str, bool]
"""The kind of a request: model, tenant, service class, and whether the prompt contains media."""


class _Kind:
    """Counters of the requests with the same model, tenant, service class and media.

    The estimator of response lengths is updated in batches. Between two updates, only sums are
    kept.

    goodput  counters by SLO outcome
    learned  number of responses passed to the estimator so far
    batch    number of pending responses at which the estimator is updated
    pending  number of responses not yet passed to the estimator

    Sums over the pending responses:

    outputs           number of responses that ended by themselves, not at a token limit
    output_tokens     their tokens, per choice
    prompts           number of prompts whose length was both estimated and reported
    estimated_tokens  tokens of these prompts as estimated
    prompt_tokens     tokens of these prompts as the engines reported them
    """

    __slots__ = (
        *("batch", "estimated_tokens", "goodput", "key", "learned", "output_tokens", "outputs"),
        *("pending", "prompt_tokens", "prompts"),
    )

    def __init__(self, key: KindKey) -> None:
        self.key = key
        self.goodput: dict[str, Counter] = {}
        self.batch, self.learned = 1, 0
        self.clear()

    def clear(self) -> None:
        """Reset the sums over pending responses to 0, after the estimator was updated with them."""
        self.pending = self.outputs = self.prompts = 0
        self.output_tokens = self.estimated_tokens = self.prompt_tokens = 0


class SloTracker:
    """Counts requests by SLO outcome, and measures how wrong predictions were.

    There is one object per process.

    output_lengths  estimator of response lengths, for requests without a token limit
    prompt_lengths  ratio of actual to estimated prompt tokens, which corrects estimates
    """

    __slots__ = (
        *("_error", "_evicted", "has_tenant_labels", "_kinds", "_metrics", "_never_seen"),
        *("_regret", "_spread", "output_lengths", "prompt_lengths"),
    )

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._kinds: dict[KindKey, _Kind] = {}
        self._error = metrics.ttft_prediction_error_ratio
        self._regret = metrics.pick_regret_seconds
        causes = metrics.prefill_tokens_total
        self._never_seen = causes.labels("never_seen")
        self._spread = causes.labels("spread")
        self._evicted = causes.labels("evicted")
        self.output_lengths, self.prompt_lengths = OutputLengths(), PromptLengths()
        self.has_tenant_labels = False

    def set_tenant_labels(self, is_enabled: bool) -> None:
        """Turn the tenant label of the metric penstock_goodput_total on or off."""
        self.has_tenant_labels = is_enabled
        self._kinds = {}

    def observe_pick_regret(self, query: RoutingQuery, pick: Pick) -> None:
        """Record by how many seconds another endpoint was expected to be faster than this pick.

        This regret is the expected time to first token at the picked endpoint, minus the lowest one
        of all candidates. Call this before capacity is reserved for the pick.
        """
        if len(pick.candidates) > 1 and pick.candidate.load.is_modelled:
            cached = query.cached_by_slot
            known = len(query.cached_by_slot)
            prompt = query.request.prompt_tokens
            slots = [candidate.load.slot for candidate in pick.candidates]
            cached_tokens = [min(prompt, cached[slot]) if slot < known else 0 for slot in slots]
            expected = ttfts(pick.candidates, cached_tokens, prompt, query.now)
            index = next(
                index
                for index, candidate in enumerate(pick.candidates)
                if candidate is pick.candidate
            )
            self._regret.observe(expected[index] - min(expected))

    def on_answered(
        self, exchange: Exchange, relay: Relay, usage: TokenUsage, received: float
    ) -> None:
        """Record an ended request whose response had begun; set its TTFT, TPOT and SLO outcome."""
        call = exchange.call
        first, last, events = relay.first_token_at, relay.last_data_at, relay.event_count
        assert call is not None
        request = call.request
        slo, output_tokens, slo_outcome = request.slo, usage.completion_tokens or 0, ""
        if first is not None and last is not None:
            tokens = output_tokens or events - 2
            ttft_s = exchange.ttft_s = first - received
            if events:
                tpot_s = exchange.tpot_s = (last - first) / (tokens - 1) if tokens > 1 else None
                slo_outcome = stream_outcome(slo, ttft_s, tpot_s)
                self._observe_error(exchange, first)
            else:
                slo_outcome = whole_outcome(slo, ttft_s, tokens)
        has_media = call.media_size.parts > 0
        key = request.model, exchange.tenant, slo.name, has_media
        kind: _Kind = self._kinds.get(key) or self._add(key)
        if exchange.outcome != "served":
            slo_outcome = FAILED if exchange.outcome == "interrupted" else ""
        elif output_tokens and relay.finish_reason not in TRUNCATED_REASONS:
            kind.outputs += 1
            kind.output_tokens += output_tokens // request.choices
        if slo_outcome:
            exchange.slo_outcome = slo_outcome
            counter: Counter = kind.goodput.get(slo_outcome) or self._counter(kind, slo_outcome)
            counter.value += 1.0
        prompt_tokens, estimated_tokens = usage.prompt_tokens or 0, call.estimated_tokens
        # A prompt of text that is longer than text can be refers to an image or file.
        is_known = prompt_tokens and estimated_tokens
        if is_known and (has_media or is_text(estimated_tokens, prompt_tokens)):
            kind.prompts += 1
            kind.estimated_tokens += estimated_tokens
            kind.prompt_tokens += prompt_tokens
        kind.pending += 1
        if kind.pending >= kind.batch:
            self._learn(kind)
        query = exchange.first_query
        if query is not None and query.cached_by_slot and exchange.pick is not None:
            self._count_computed_tokens(query, exchange.pick.cached_tokens, usage)

    def _add(self, key: KindKey) -> _Kind:
        if len(self._kinds) >= MAX_KINDS:  # models and tenants change with configurations
            self._kinds.clear()
        kind = self._kinds[key] = _Kind(key)
        return kind

    def _learn(self, kind: _Kind) -> None:
        kind.learned += kind.pending
        if kind.learned >= LEARN_SINGLY:
            kind.batch = LEARN_BATCH
        model, tenant, slo, has_media = kind.key
        if kind.outputs:
            mean = kind.output_tokens / kind.outputs
            self.output_lengths.record(model, tenant, slo, mean, kind.outputs)
        if kind.prompts:
            self.prompt_lengths.record(
                model, has_media, kind.estimated_tokens, kind.prompt_tokens, kind.prompts
            )
        kind.clear()

    def _observe_error(self, exchange: Exchange, first: float) -> None:
        # Observe the relative error of the predicted TTFT, if there was a prediction.
        #
        # For a split request, the prediction is that of the prefill and decode pair.
        entry = exchange.reservation.entry if exchange.reservation is not None else None
        if entry is None or exchange.picked_at is None:
            return
        predicted_s = entry.predicted_ttft_s
        if predicted_s is None and exchange.split is not None:
            predicted_s = exchange.split.predicted_ttft_s
        if predicted_s is not None:
            exchange.predicted_ttft_s = predicted_s
            exchange.predicted_tpot_s = entry.predicted_tpot_s
            actual_s = first - exchange.picked_at
            self._error.observe(abs(predicted_s - actual_s) / actual_s if actual_s > 0 else 0.0)

    def on_unanswered(self, exchange: Exchange) -> None:
        """Count a request that ended without a response, as shed (refused) or failed.

        Errors of the client, such as an invalid request, are not counted.
        """
        call = exchange.call
        if call is None or exchange.reason == "tenant_rate_limited":
            return
        if exchange.status == 429 or exchange.status >= 500:
            exchange.slo_outcome = "shed" if exchange.status == 429 else FAILED
            request = call.request
            key = request.model, exchange.tenant, request.slo.name, call.media_size.parts > 0
            kind = self._kinds.get(key) or self._add(key)
            self._counter(kind, exchange.slo_outcome).inc()

    def _counter(self, kind: _Kind, slo_outcome: str) -> Counter:
        model, tenant, slo, _ = kind.key
        tenant_label = tenant if self.has_tenant_labels else ""
        counter = self._metrics.goodput_total.labels(slo, slo_outcome, tenant_label, model)
        kind.goodput[slo_outcome] = counter
        return counter

    def _count_computed_tokens(self, query: RoutingQuery, believed: int, usage: TokenUsage) -> None:
        # Count the prompt tokens that had to be computed, by cause.
        #
        # never_seen  cached at no endpoint
        # spread      cached at another endpoint than the picked one
        # evicted     believed to be cached at the picked endpoint, which no longer had them
        prompt, longest = query.request.prompt_tokens, longest_match(query.cached_by_slot)
        if prompt > longest:  # calls of max() would cost more than the rest of this function
            self._never_seen.value += prompt - longest
        if longest > believed:
            self._spread.value += longest - believed
        if usage.cached_tokens is not None and usage.cached_tokens < believed:
            self._evicted.value += believed - usage.cached_tokens
