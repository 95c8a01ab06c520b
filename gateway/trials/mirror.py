"""Mirrors: samples live requests, sends copies to candidate engines, and compares the answers.

When the client of a sampled request has its whole answer, three copies of the request are sent one
after another, at temperature 0:

- to the engine that served it
- to a candidate engine
- to the first engine again

The difference between the first engine's two answers is the noise floor. The answers are compared
as in `penstock golden run` (policies/golden).

Copies bypass admission control, reserve no capacity, and are not counted in usage, quotas or SLOs.
Prompts and answers are dropped after their comparison.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from gateway.config import Config, Mirror
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.metrics.mirror_metrics import MirrorMetrics
from gateway.protocol.request.api_call import Call
from gateway.request_record import Exchange
from gateway.trials.canary import HASH_RANGE, CanarySampler
from gateway.trials.mirror_client import MirrorClient, MirroredAnswer
from gateway.trials.mirror_token_budget import Spending, TokenBudget
from policies.golden.answers import path_of, prompt_of
from policies.golden.compare import AnswerPair, GoldenReport, compare, judge

log = logging.getLogger("penstock")

BLOCK = 200
"""Number of compared requests per verdict.

With this many requests, at most one of 100 candidates that are not worse is found to be worse.
"""

MAX_BODY_BYTES = 1 << 18
COPIES = 3
IDLE_SHARE = 0.5  # share of max_concurrency from which an engine gets no copies
PATHS = ("/v1/chat/completions", "/v1/completions")

LiveEndpoints = Callable[[], Sequence[LiveEndpoint]]


class MirroredRequest:
    """A request whose answer is compared with that of a candidate engine.

    It exists from its selection to the end of the comparison, and counts against the mirror's limit
    on concurrent requests.
    """

    __slots__ = ("_members", "_mirror", "_salt")

    def __init__(self, mirror: PoolMirror, call: Call) -> None:
        # These raw values keep the bytes of the body in memory, even after the call releases them.
        self._mirror, self._members, self._salt = mirror, call.members, call.salt

    def on_ended(self, exchange: Exchange) -> None:
        """Begin the comparison if the client has its whole answer; otherwise drop the request."""
        exchange.mirrored = None
        pick, is_served = exchange.pick, exchange.outcome == "served" and exchange.status == 200
        if pick is None or not is_served or exchange.tier:
            self._mirror.give_up("unanswered")
            return
        self._mirror.begin(self._members, self._salt, pick.candidate.load.slot)


class PoolMirror:
    """The mirror of a pool: it selects requests, and compares answers of candidate engines."""

    def __init__(
        self,
        pool: str,
        spec: Mirror,
        metrics: MirrorMetrics,
        endpoints: LiveEndpoints,
        client: MirrorClient,
    ) -> None:
        self.pool, self.spec = pool, spec
        self._metrics, self._endpoints, self._client = metrics, endpoints, client
        self._sampler = CanarySampler(
            f"{pool} mirror", int(HASH_RANGE * spec.percent / 100), frozenset()
        )
        self._budget = TokenBudget(spec.tokens_per_minute)
        self._places = spec.in_flight
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._floors: list[AnswerPair] = []
        self._pairs: list[AnswerPair] = []
        self._took_s = [0.0, 0.0]
        self.report: GoldenReport | None = None
        self.blocks = 0

    def offer(self, call: Call) -> MirroredRequest | None:
        """Decide whether this request is one of those whose answers are compared (sampled).

        If so, return an object that keeps its prompt, else None.
        """
        request, spec = call.request, self.spec
        if spec.models and request.model not in spec.models:
            return None
        if not self._sampler.selects(request):
            return None
        if not _is_suitable(call):
            self._count("unsuitable")
        elif not self._places:
            self._count("busy")
        else:
            self._places -= 1
            return MirroredRequest(self, call)
        return None

    def give_up(self, result: str) -> None:
        """Drop a sampled request without a comparison, and count `result` as the reason."""
        self._places += 1
        self._count(result)

    def begin(self, members: Mapping[str, msgspec.Raw], salt: bytes, slot: int) -> None:
        """Start to compare the answer of the endpoint in `slot` with that of a candidate engine.

        A mirror that has been closed meanwhile starts nothing.

        members  members of the request's body, as raw JSON
        salt     cache salt of the request
        """
        if self._is_closed:
            return
        base = next((live for live in self._endpoints() if live.load.slot == slot), None)
        others = [live for live in self._endpoints() if live.endpoint.pool == self.spec.to]
        up = [live for live in others if _is_up(live)]
        idle = [live for live in up if _is_idle(live)]
        if base is None or not up:
            self.give_up("down")
        elif not idle or not _is_up(base) or not _is_idle(base):
            self.give_up("loaded")
        else:
            candidate = min(idle, key=lambda live: live.load.in_flight)
            self._start(members, salt, base, candidate)

    def _start(
        self,
        members: Mapping[str, msgspec.Raw],
        salt: bytes,
        base: LiveEndpoint,
        candidate: LiveEndpoint,
    ) -> None:
        # A token has at least two bytes, so this estimate is never too low.
        size = sum(map(len, members.values()))
        spending = self._budget.try_take(COPIES * (size // 2 + self.spec.max_tokens), monotonic())
        if spending is None:
            self.give_up("budget")
            return
        task = asyncio.create_task(
            self._compare(members, salt, (base, candidate), spending), name="mirror"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(
        self,
        members: Mapping[str, msgspec.Raw],
        salt: bytes,
        engines: tuple[LiveEndpoint, LiveEndpoint],
        spending: Spending,
    ) -> None:
        result, used = "failed", 0
        try:
            decoded = {name: msgspec.json.decode(value) for name, value in members.items()}
            prompt, own = prompt_of(decoded, self.spec.max_tokens), decoded.get("model")
            base, candidate = engines
            answers: list[MirroredAnswer] = []
            for live, name in ((base, str(own)), (candidate, self.spec.model), (base, str(own))):
                answer = await self._client.ask(live, path_of(prompt), prompt, name, salt)
                answers.append(answer)
                used += answer.tokens
            self._metrics.tokens.labels(self.pool).inc(used)
            if not answers[0].answer.error and not answers[2].answer.error:
                result = "compared"
                self._add(prompt, answers)
        except Exception:  # the prompt may be in the error, which is not shown
            log.error("a comparison of the mirror of pool %s failed", self.pool)
        finally:
            self._budget.settle(spending, used)
            self._places += 1
            self._count(result)

    def _add(self, prompt: Mapping[str, Any], answers: Sequence[MirroredAnswer]) -> None:
        base, candidate, again = (each.answer for each in answers)
        self._floors.append(compare(prompt, base, again))
        self._pairs.append(compare(prompt, base, candidate))
        self._took_s[0] += base.took_s
        self._took_s[1] += candidate.took_s
        if len(self._pairs) >= BLOCK:
            self._conclude()

    def _judge(self) -> GoldenReport:
        count = max(1, len(self._pairs))
        took_s = self._took_s[0] / count, self._took_s[1] / count
        return judge(self._floors, self._pairs, 0.0, took_s)

    def _conclude(self) -> None:
        report, before = self._judge(), self.report
        self.report, self.blocks = report, self.blocks + 1
        self._floors, self._pairs, self._took_s = [], [], [0.0, 0.0]
        for measure in report.measures:
            self._metrics.loss.labels(self.pool, measure.name).set(round(measure.worse_by, 6))
        self._metrics.worse.labels(self.pool).set(float(report.is_worse))
        if report.is_worse and (before is None or not before.is_worse):
            names = ", ".join(each.name for each in report.measures if each.is_worse)
            log.warning(
                "mirror of pool %s: the answers of pool %s are worse than chance explains: %s",
                *(self.pool, self.spec.to, names),
            )

    def _count(self, result: str) -> None:
        if self._is_closed:  # the pool's metrics are removed
            return
        self._metrics.requests.labels(self.pool, result).inc()

    def close(self) -> None:
        """Cancel the pool's comparisons in progress, and stop counting results."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    def as_json(self) -> dict[str, Any]:
        """Return the state and the verdicts of a mirror as JSON-compatible values."""
        counts = {
            values[1]: int(child.value)
            for values, child in self._metrics.requests.children()
            if values[0] == self.pool
        }
        return {
            "pool": self.pool,
            "to": self.spec.to,
            "percent": self.spec.percent,
            "requests": counts,
            "tokens": int(self._metrics.tokens.labels(self.pool).value),
            "blocks": self.blocks,
            "block_size": BLOCK,
            "open": _report_as_json(self._judge()) if self._pairs else None,
            "last": None if self.report is None else _report_as_json(self.report),
        }


class Mirrors:
    """All mirrors of this process. A mirror compares a pool's answers with a candidate engine's.

    by_pool   the mirror of each pool; empty if no pool has one
    excluded  tenants whose requests are never compared
    """

    def __init__(
        self, metrics: MirrorMetrics, endpoints: LiveEndpoints, *, is_active: bool = True
    ) -> None:
        """Create the collection without mirrors; configure() adds them.

        metrics    the metrics of mirrors
        endpoints  the table of live endpoints
        is_active  whether this process has mirrors. Only one of several worker processes has, so
                   that the token budget applies once
        """
        self._metrics, self._endpoints, self._is_active = metrics, endpoints, is_active
        self._client = MirrorClient()
        self.by_pool: dict[str, PoolMirror] = {}
        self.excluded: frozenset[str] = frozenset()
        self._excludes_tenants = False

    def configure(self, config: Config) -> Mirrors | None:
        """Apply a new configuration; a mirror whose section has changed starts again.

        Returns this object if any pool has a mirror, else None.
        """
        self.excluded = frozenset(one.name for one in config.tenants if not one.mirror)
        self._excludes_tenants = config.cache.isolate == "required"
        specs = {name: pool.mirror for name, pool in config.pools.items() if self._is_active}
        for name in [*self.by_pool]:
            if specs.get(name) != self.by_pool[name].spec:
                self.by_pool.pop(name).close()
                self._metrics.remove_pool(name)
        for name, spec in specs.items():
            if spec is not None and name not in self.by_pool:
                self.by_pool[name] = PoolMirror(
                    name, spec, self._metrics, self._endpoints, self._client
                )
        return self if self.by_pool else None

    def offer(self, exchange: Exchange, pool: str, call: Call) -> None:
        """Let the pool's mirror decide whether to compare the answer to this request.

        If so, `exchange.mirrored` keeps its prompt.
        """
        mirror = self.by_pool.get(pool)
        if mirror is None or exchange.tenant in self.excluded:
            return
        if exchange.tenant and self._excludes_tenants:
            return
        try:
            exchange.mirrored = mirror.offer(call)
        except Exception:  # a mirror must not fail a client's request
            log.exception("the mirror of pool %s failed", pool)

    async def close(self) -> None:
        """Cancel the comparisons of all pools, and close the connections to their engines."""
        for mirror in self.by_pool.values():
            mirror.close()
        await self._client.close()

    def as_json(self) -> dict[str, Any]:
        return {"mirrors": [mirror.as_json() for mirror in self.by_pool.values()]}


def _report_as_json(report: GoldenReport) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(report)
    return members | {"is_worse": report.is_worse}


def _is_suitable(call: Call) -> bool:
    request = call.request
    is_single = request.prompts == 1 and request.choices == 1 and not call.media_size.parts
    return is_single and call.api.path in PATHS and 0 < len(call.body) <= MAX_BODY_BYTES


def _is_up(live: LiveEndpoint) -> bool:
    return live.load.is_available and not live.is_leaving and not live.is_drained


def _is_idle(live: LiveEndpoint) -> bool:
    load = live.load
    return not load.waiting and load.in_flight < IDLE_SHARE * live.endpoint.max_concurrency
