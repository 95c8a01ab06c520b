"""The schedule of automatic policy selection: compares when due, then switches a pool's policy.

At regular intervals, a replay of the pool's recent requests compares the permitted policies. A
comparison is cancelled when an endpoint fails. policies/auto/switch_decision.py decides whether to
change the policy. A change is applied as a new version of the configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, time
from typing import Any

from gateway.auto.config_access_interface import ChangeResult, ConfigAccess
from gateway.auto.config_text_edit import with_pin, with_policy
from gateway.auto.pool_state import PoolState, SwitchRecord, member_of
from gateway.auto.preconditions import find_failure, find_trial
from gateway.auto.replay_job import build_job
from gateway.auto.replay_process import ReplayError, run_replay
from gateway.config import AutoPolicy
from gateway.metrics.auto_metrics import AutoMetrics
from policies.auto.replay_messages import PoolEstimate, ReplayAnswer, ReplayJob
from policies.auto.switch_decision import Action, PolicyDecision

log = logging.getLogger("penstock")

TICK_S = 5.0
TICKS_PER_INTERVAL = 5
MOST_BACKOFF = 16
"""Largest factor by which the interval between two comparisons of policies grows.

The interval doubles with every comparison in a row that fails.
"""

SWITCHES_KEPT = 20
ROLLBACKS = frozenset({"rollback", "auto_rollback"})

RunReplay = Callable[[ReplayJob], Awaitable[ReplayAnswer]]


class UnknownPoolError(Exception):
    """Raised for a pool that does not exist or whose configuration has no section `auto`."""


class AutoPolicyController:
    """Chooses the routing policies of all pools that have the section `auto`, in one process."""

    def __init__(
        self, target: ConfigAccess, metrics: AutoMetrics, run: RunReplay = run_replay
    ) -> None:
        self._target, self._metrics, self._run_replay = target, metrics, run
        self._states: dict[str, PoolState] = {}
        self._task: asyncio.Task[None] | None = None
        self._comparison: asyncio.Task[None] | None = None
        self._is_switching = False
        self._follow_config("start")

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="choose policies")

    async def stop(self) -> None:
        """Cancel the comparison of policies in progress, if any, and start no more."""
        for task in (self._task, self._comparison):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._task = self._comparison = None

    def on_applied(self, trigger: str) -> None:
        """Update the state of automatic policy selection after a configuration was applied.

        `trigger` is the cause of the change. After a rollback to an older version, the restored
        policies are kept until an operator permits changes again.
        """
        self._follow_config(trigger)

    def _follow_config(self, trigger: str) -> None:
        pools, now_s = self._auto_pools(), time()
        for name in self._states.keys() - pools.keys():
            del self._states[name]
            self._metrics.remove_pool(name)
        for name, auto in pools.items():
            policy = member_of(self._target.running.config.pools[name].policy)
            state = self._states.get(name)
            if state is None:
                self._states[name] = PoolState(policy, monotonic() + auto.interval, now_s)
            elif state.policy != policy:
                state.on_policy_changed(policy, now_s)
                if not self._is_switching:
                    state.held = "rolled back" if trigger in ROLLBACKS else ""

    def _auto_pools(self) -> dict[str, AutoPolicy]:
        pools = self._target.running.config.pools
        return {name: pool.auto for name, pool in pools.items() if pool.auto is not None}

    async def _run(self) -> None:
        while True:
            shortest_s = min(
                (auto.interval for auto in self._auto_pools().values()), default=TICK_S
            )
            await asyncio.sleep(min(TICK_S, shortest_s / TICKS_PER_INTERVAL))
            try:
                await self.tick(monotonic())
            except Exception:  # an error here must not end the loop
                log.exception("automatic policy selection: the periodic task failed")

    async def tick(self, now: float) -> None:
        """Check the pools for failures, and start a comparison of policies if one is due.

        `now` is monotonic time in seconds.
        """
        if not self._states:
            return
        rows, config = await self._target.endpoint_rows(), self._target.running.config
        is_disturbed = self._target.is_draining()
        for name, state in self._states.items():
            failure = find_failure(name, rows)
            state.trouble = failure or find_trial(config.pools[name])
            is_disturbed |= bool(failure)  # no replay may run while the requests of a pool fail
            if state.trouble:
                state.counts_from_s = time()
                state.decider.forget()
        is_idle = self._comparison is None or self._comparison.done()
        if is_disturbed and self._comparison and not is_idle:
            self._comparison.cancel()
        states = self._states.items()
        due = [name for name, state in states if state.due_at <= now and not state.trouble]
        if due and is_idle and not is_disturbed:
            self._comparison = asyncio.create_task(
                self._compare(due, rows), name="compare policies"
            )

    async def _compare(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        states = {name: self._states[name] for name in names if name in self._states}
        loaded = self._target.running
        began, failed = monotonic(), dict.fromkeys(states, "")
        try:
            answer = await self._run_replay(build_job(loaded.config, states, rows, time()))
            self._metrics.replay_cpu.inc(answer.cpu_s)
            failed |= answer.failed
            for estimate in answer.estimates:
                if self._target.running is loaded:
                    await self._conclude(estimate)
                    loaded = self._target.running
        except ReplayError as error:
            failed = dict.fromkeys(states, str(error))
        finally:
            for name, state in states.items():
                self._schedule(name, state, began, failed[name])

    def _schedule(self, name: str, state: PoolState, began: float, failure: str) -> None:
        # A pool that fails again and again is compared less and less often.
        auto = self._auto_pools().get(name)
        if auto is None:
            return
        if failure:
            self._metrics.comparisons.labels(name, "failed").inc()
            if failure != state.failure:
                log.warning(
                    "automatic policy selection: the policies of pool %s cannot be compared: %s",
                    name,
                    failure,
                )
        state.failure = failure
        state.failures = state.failures + 1 if failure else 0
        factor = min(MOST_BACKOFF, 2**state.failures)
        state.due_at = max(began + factor * auto.interval, monotonic())

    async def _conclude(self, estimate: PoolEstimate) -> None:
        name = estimate.pool
        state, auto = self._states.get(name), self._auto_pools().get(name)
        if state is None or auto is None or state.trouble:
            return
        may_switch = auto.mode == "switch" and not auto.pinned and not state.held
        decision = state.decider.decide(monotonic(), estimate, may_switch=may_switch)
        is_news = state.decision is None or state.decision.action is not decision.action
        state.compared_at_s, state.estimate, state.decision = time(), estimate, decision
        self._metrics.comparisons.labels(name, decision.action).inc()
        self._metrics.gain.labels(name).set(decision.gain)
        self._metrics.error.labels(name).set(decision.error)
        if decision.action is Action.ADVISE and is_news:
            log.info("automatic policy selection: pool %s: %s", name, decision.reason)
        if decision.action is Action.SWITCH:
            await self._switch(name, state, auto, decision)

    async def _switch(
        self, name: str, state: PoolState, auto: AutoPolicy, decision: PolicyDecision
    ) -> None:
        members = map(member_of, auto.portfolio)
        member = next((one for one in members if one.label == decision.member), None)
        if member is None:
            return
        before = state.policy
        text = with_policy(self._target.running.text, name, member)
        outcome = await self._change(name, text, decision.reason)
        if outcome.result != "applied":
            log.warning(
                "automatic policy selection: pool %s keeps policy %s: %s",
                name,
                before.label,
                outcome.message,
            )
            return
        state.decider.on_switched(monotonic(), before.label)
        self._metrics.switches.labels(name).inc()
        record = SwitchRecord(time(), outcome.version, before.label, member.label, decision.reason)
        state.switches = [*state.switches, record][-SWITCHES_KEPT:]
        log.info(
            "automatic policy selection: pool %s changes from policy %s to %s: %s",
            name,
            before.label,
            member.label,
            decision.reason,
        )

    async def _change(self, pool: str, text: bytes, reason: str) -> ChangeResult:
        # Apply `text` as the new configuration, if it changes only this pool's policy or pin.
        tried = await self._target.change(text, reason, dry_run=True)
        own = (f"pools.{pool}.policy", f"pools.{pool}.auto")
        others = [path for path in tried.changed if not path.startswith(own)]
        if others:
            message = f"the configuration's text shares this setting with {', '.join(others)}"
            return ChangeResult("rejected", message, tried.version)
        if tried.result != "dry_run":
            return tried
        self._is_switching = True
        try:
            return await self._target.change(text, reason, dry_run=False)
        finally:
            self._is_switching = False

    async def set_pin(self, pool: str, *, is_pinned: bool) -> ChangeResult:
        """Pin or unpin the pool's routing policy. A pinned policy is never changed automatically.

        Raises UnknownPoolError for a pool without the section `auto`.
        """
        state, auto = self._states.get(pool), self._auto_pools().get(pool)
        if state is None or auto is None:
            raise UnknownPoolError(f"no pool named {pool!r} has the section auto")
        if not is_pinned:
            state.held = ""
        if auto.pinned == is_pinned:
            state_text = "is pinned already" if is_pinned else "may change its policy"
            message = f"pool {pool} {state_text}"
            return ChangeResult("unchanged", message, self._target.version)
        text = with_pin(self._target.running.text, pool, is_pinned=is_pinned)
        reason = "pinned by an operator" if is_pinned else "unpinned by an operator"
        return await self._change(pool, text, reason)

    def as_json(self) -> dict[str, Any]:
        """Return the state of every pool with the section `auto`, as JSON-compatible values."""
        pools = [
            {
                "pool": name,
                "mode": auto.mode,
                "pinned": auto.pinned,
                "interval_s": auto.interval,
                **state.as_json(),
            }
            for name, auto in self._auto_pools().items()
            if (state := self._states.get(name)) is not None
        ]
        is_comparing = self._comparison is not None and not self._comparison.done()
        return {
            "pools": pools,
            "comparing": is_comparing,
            "replay_cpu_s": round(self._metrics.replay_cpu.value, 3),
        }
