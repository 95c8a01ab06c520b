"""Whether promises were kept, and how good the beliefs behind them were: what is learnt from a request that is over.

Lives here: the outcome as admissions hear it, and the metrics of promises and predictions. Not here: the access line
and everything else that is counted of a request (account.py).
"""

from __future__ import annotations

from time import monotonic

from gateway.exchange import Exchange
from gateway.meters import Counter
from gateway.metrics import Metrics
from gateway.relay import Relay
from gateway.told import Usage
from policies.admission import Outcome
from policies.latency import ttfts
from policies.lengths import OutputLengths
from policies.model import Ask, Pick, Slo
from policies.prompt_lengths import CLOSE_ENOUGH, PromptLengths, is_text

FAILED = "failed"
CUT_OFF = frozenset((None, "length", "abort", "error"))
"""Reasons why an answer ended that say nothing of how long it would have become by itself."""
AT_ONCE, BATCH = 16, 8
"""The first answers of a kind are learnt from at once, later ones so many together."""
MAX_KINDS = 8192
REGRET_EVERY = 32
"""One pick in so many is compared with the candidate whose first token was expected soonest: that takes a while."""


def outcome_of(x: Exchange) -> Outcome:
    """How a request that had entered ended. An engine's word about the request itself is nobody's fault."""
    now, relay = monotonic(), x.relay
    if relay is None or not relay.committed:
        blameless = x.outcome == "client_gone" or x.reason == "engine"
        return Outcome(now, ended="ignored" if blameless else "dropped")
    usage = usage_of(x, relay)
    ttft_s, tpot_s = pace(x, relay, usage)
    ended = "served" if x.outcome == "served" else "ignored" if x.outcome == "client_gone" else "dropped"
    return Outcome(now, ttft_s, tpot_s, _tokens(x, relay, usage), usage.cached_tokens, ended)


def _tokens(x: Exchange, relay: Relay, usage: Usage) -> int:
    """Of the answer, as far as anybody knows: an engine that does not count gives nothing back to a quota."""
    if usage.completion_tokens is None and not relay.events and x.call is not None:
        return x.call.request.output_tokens
    return usage.completion_tokens or relay.events


def usage_of(x: Exchange, relay: Relay) -> Usage:
    """A decoder that was handed the KV calls the transfer a cache hit; the prefiller knows better."""
    usage, split = relay.usage, x.split
    if split is None or split.cached_tokens is None:
        return usage
    return Usage(usage.prompt_tokens, usage.completion_tokens, split.cached_tokens)


def pace(x: Exchange, relay: Relay, usage: Usage) -> tuple[float | None, float | None]:
    """Seconds from its last byte to the first token, and per token after it; None where there was none."""
    first, last, received = relay.first_token_at, relay.last_at, x.received_at
    if first is None or last is None or received is None:
        return None, None
    tokens = usage.completion_tokens or relay.events - 2
    return first - received, (last - first) / (tokens - 1) if relay.events and tokens > 1 else None


def judge(slo: Slo, ttft_s: float, tpot_s: float | None) -> str:
    """Which promise to a stream was missed, if any."""
    if tpot_s is None or tpot_s <= slo.tpot_s:
        return "met" if ttft_s <= slo.ttft_s else "ttft_missed"
    return "tpot_missed" if ttft_s <= slo.ttft_s else "both_missed"


def judge_whole(slo: Slo, ttft_s: float, tokens: int) -> str:
    """An answer that comes whole is judged by its end: it may take the budget of its first token and of all others."""
    return "met" if ttft_s <= slo.ttft_s + slo.tpot_s * max(0, tokens - 1) else "ttft_missed"


Key = tuple[str, str, str, bool]
"""Model, tenant, class, and whether there are media in the prompt."""


class _Kind:
    """The answers to one kind of request.

    goodput  counters by what became of the promise
    lessons  answers that nothing was learnt from yet: output tokens per choice, estimated and counted tokens of the
             prompt, 0 where they are not known; `batch` of them are learnt from together
    """

    __slots__ = ("batch", "goodput", "key", "lessons", "seen")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.goodput: dict[str, Counter] = {}
        self.lessons: list[tuple[int, int, int]] = []
        self.batch, self.seen = 1, 0


class Kept:
    """Counts promises by class, and what was predicted. One per process; children of metrics are found once.

    lengths  of answers, for the next request that names no bound
    prompts  counted tokens of prompts over estimated ones, for the next estimate
    """

    __slots__ = (
        *("_error", "_evicted", "_kinds", "_metrics", "_never", "_regret", "_spread", "_tenants"),
        *("lengths", "prompts"),
    )

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._kinds: dict[Key, _Kind] = {}
        self._error, self._regret = metrics.ttft_prediction_error_ratio, metrics.pick_regret_seconds
        causes = metrics.prefill_tokens_total
        self._never, self._spread, self._evicted = map(causes.labels, ("never_seen", "spread", "evicted"))
        self.lengths, self.prompts = OutputLengths(), PromptLengths()
        self._tenants = False

    def tell_tenants(self, wanted: bool) -> None:
        """Whether promises are counted by tenant as well from now on."""
        self._tenants = wanted
        self._kinds = {}

    def compare(self, ask: Ask, pick: Pick) -> None:
        """One pick in REGRET_EVERY, before its place is taken, beside what is believed to have been soonest."""
        if len(pick.kept) > 1 and pick.candidate.load.believed:
            cached, known, prompt = ask.cached, len(ask.cached), ask.request.prompt_tokens
            held = [cached[each.load.slot] if each.load.slot < known else 0 for each in pick.kept]
            expected = ttfts(pick.kept, [min(prompt, tokens) for tokens in held], prompt, ask.now)
            chosen = next(at for at, each in enumerate(pick.kept) if each is pick.candidate)
            self._regret.observe(expected[chosen] - min(expected))

    def answered(self, x: Exchange, relay: Relay, usage: Usage, received: float) -> None:
        """One whose answer has begun. Leaves what it finds in the exchange."""
        call, first, last, events = x.call, relay.first_token_at, relay.last_at, relay.events
        assert call is not None
        request = call.request
        slo, output_tokens, whole_tokens = request.slo, usage.completion_tokens or 0, 0
        if first is not None and last is not None:
            tokens = output_tokens or events - 2
            ttft_s = x.ttft_s = first - received
            if events:
                tpot_s = x.tpot_s = (last - first) / (tokens - 1) if tokens > 1 else None
                x.kept = judge(slo, ttft_s, tpot_s)
                self._predicted(x, first)
            else:
                x.kept = judge_whole(slo, ttft_s, tokens)
        if x.outcome != "served":
            x.kept = FAILED if x.outcome == "interrupted" else ""
        elif output_tokens and relay.finish_reason not in CUT_OFF:
            whole_tokens = output_tokens // request.choices
        key = request.model, x.tenant, slo.name, call.media > 0
        kind = self._kinds.get(key) or self._add(key)
        if x.kept:
            counter = kind.goodput.get(x.kept) or self._find(kind, x.kept)
            counter.value += 1.0
        kind.lessons.append((whole_tokens, call.estimated_tokens, usage.prompt_tokens or 0))
        if len(kind.lessons) >= kind.batch:
            self._learn(kind)
        if x.asked is not None and x.asked.cached and x.pick is not None:
            self._computed(x.asked, x.pick.cached_tokens, usage)

    def _add(self, key: Key) -> _Kind:
        if len(self._kinds) >= MAX_KINDS:  # models and tenants come and go with configurations
            self._kinds.clear()
        kind = self._kinds[key] = _Kind(key)
        return kind

    def _learn(self, kind: _Kind) -> None:
        """Learn from the answers that are due."""
        lessons, kind.lessons = kind.lessons, []
        kind.seen += len(lessons)
        if kind.seen >= AT_ONCE:
            kind.batch = BATCH
        outputs = [output for output, _, _ in lessons if output]
        model, tenant, slo, has_media = kind.key
        if outputs:
            self.lengths.ended(model, tenant, slo, sum(outputs) / len(outputs), len(outputs))
        prompts = [(estimated, counted) for _, estimated, counted in lessons if estimated and counted]
        if prompts:
            estimated_tokens, prompt_tokens = map(sum, zip(*prompts, strict=True))
            if prompt_tokens > (1.0 + CLOSE_ENOUGH) * estimated_tokens and not has_media:
                prompts = [pair for pair in prompts if is_text(*pair)]
                estimated_tokens, prompt_tokens = map(sum, zip((0, 0), *prompts, strict=True))
            self.prompts.counted(model, has_media, estimated_tokens, prompt_tokens, len(prompts))

    def _predicted(self, x: Exchange, first: float) -> None:
        """How far off the prediction was, where there was one. A pair's is told by the pair, not by either place."""
        place = x.booking.place if x.booking is not None else None
        if place is None or x.picked_at is None:
            return
        predicted_s = place.predicted_ttft_s
        if predicted_s is None and x.split is not None:
            predicted_s = x.split.predicted_ttft_s
        if predicted_s is not None:
            x.predicted_ttft_s, x.predicted_tpot_s = predicted_s, place.predicted_tpot_s
            actual_s = first - x.picked_at
            self._error.observe(abs(predicted_s - actual_s) / actual_s if actual_s > 0 else 0.0)

    def unanswered(self, x: Exchange) -> None:
        """One that got no answer: refused at the door, or nobody could."""
        if x.call is not None and x.reason != "tenant_rate_limited" and (x.status == 429 or x.status >= 500):
            x.kept = "shed" if x.status == 429 else FAILED
            request = x.call.request
            key = request.model, x.tenant, request.slo.name, x.call.media > 0
            self._find(self._kinds.get(key) or self._add(key), x.kept).inc()

    def _find(self, kind: _Kind, kept: str) -> Counter:
        model, tenant, slo, _ = kind.key
        labels = slo, kept, tenant if self._tenants else "", model
        counter = kind.goodput[kept] = self._metrics.goodput_total.labels(*labels)
        return counter

    def _computed(self, asked: Ask, believed: int, usage: Usage) -> None:
        """Why the prompt's tokens were computed: nobody had them, others had, or the endpoint had lost them."""
        prompt, held = asked.request.prompt_tokens, max(asked.cached)
        self._never.value += max(0, prompt - held)
        self._spread.value += max(0, held - believed)
        if usage.cached_tokens is not None and usage.cached_tokens < believed:
            self._evicted.value += believed - usage.cached_tokens
