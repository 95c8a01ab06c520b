"""Tests of automatic policy selection: switches, fixed policies, rollbacks and errors.

The simulations that compare policies are scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import pytest

from gateway.auto.auto_controller import AutoPolicyController, UnknownPoolError
from gateway.auto.config_access_interface import ChangeResult
from gateway.auto.replay_process import ReplayError
from gateway.config import LoadedConfig, load_text
from gateway.config.diff import diff
from gateway.metrics.auto_metrics import AutoMetrics
from gateway.metrics.metric_types import MetricRegistry
from policies.auto.replay_messages import MemberEstimate, PoolEstimate, ReplayAnswer, ReplayJob

TEXT = """version: 1
observability: {access_log: /tmp/access.jsonl}
pools:
  chat:
    policy: round_robin
    auto: {portfolio: [prefix_aware, round_robin]}
    endpoints: [{url: "http://127.0.0.1:9001", name: e0}]
"""


class ScriptedTarget:
    """A fake gateway whose policy can be changed; a change takes effect at once."""

    def __init__(self, text: str) -> None:
        self.running: LoadedConfig = load_text(text.encode(), "gateway.yaml", {})
        self.version = 1
        self.state = "up"
        self.reasons: list[str] = []
        self.on_applied: Callable[[str], None] = lambda trigger: None

    def is_draining(self) -> bool:
        return False

    async def endpoint_rows(self) -> Sequence[Mapping[str, Any]]:
        row = {
            "name": "e0",
            "state": self.state,
            "available": self.state == "up",
            "kv_tokens": 90_000,
        }
        return [{"pool": pool, **row} for pool in self.running.config.pools]

    async def change(self, text: bytes, reason: str, *, dry_run: bool) -> ChangeResult:
        loaded = load_text(text, "gateway.yaml", {})
        changed = tuple(change.path for change in diff(self.running, loaded))
        if dry_run:
            return ChangeResult("dry_run", "", self.version, changed)
        self.reasons.append(reason)
        self.apply(loaded, "auto")
        return ChangeResult("applied", "reloaded", self.version, changed)

    def apply(self, loaded: LoadedConfig, trigger: str) -> None:
        self.running, self.version = loaded, self.version + 1
        self.on_applied(trigger)

    @property
    def policy(self) -> str:
        return self.running.config.pools["chat"].policy.name


async def answer_better(job: ReplayJob) -> ReplayAnswer:
    """Return what a replay process returns if another policy is much better than the current one.

    With the other policy, 40 percentage points more requests are served in time.
    """
    (pool,) = job.pools
    first, *others = pool.members
    members = [MemberEstimate(first.label, 0.5)]
    gains = (0.378, 0.422) * 4
    members += [MemberEstimate(other.label, 0.9, 0.4, 0.02, gains) for other in others]
    estimate = PoolEstimate("chat", first.label, 1000, 600.0, "", tuple(members))
    return ReplayAnswer((estimate,), {}, 2.0)


class Harness:
    def __init__(
        self,
        text: str = TEXT,
        run: Callable[[ReplayJob], Awaitable[ReplayAnswer]] = answer_better,
    ) -> None:
        self.target = ScriptedTarget(text)
        self.metrics = AutoMetrics(MetricRegistry())
        self.controller = AutoPolicyController(self.target, self.metrics, run)
        self.target.on_applied = self.controller.on_applied

    async def compare(self, later_s: float = 1000.0) -> dict[str, Any]:
        await self.controller.tick(monotonic() + later_s)
        comparison = self.controller._comparison
        if comparison is not None:
            await asyncio.wait([comparison])
        (pool,) = self.controller.as_json()["pools"]
        return dict(pool)


async def test_a_better_policy_becomes_a_version_with_its_reason() -> None:
    harness = Harness()
    pool = await harness.compare()
    assert harness.target.policy == "prefix_aware"
    assert harness.target.reasons == [
        "prefix_aware would have served 40.0 points more (error 2.0 points) of 1000 requests"
    ]
    (switch,) = pool["switches"]
    assert (switch["version"], switch["before"], switch["after"]) == (
        *(2, "round_robin", "prefix_aware"),
    )
    metrics = harness.metrics
    assert metrics.switches.labels("chat").value == 1
    assert metrics.replay_cpu.value == 2.0
    assert metrics.gain.labels("chat").value == 0.4


async def test_no_comparison_is_made_before_the_interval_has_passed() -> None:
    harness = Harness()
    pool = await harness.compare(later_s=200.0)
    assert (pool["decision"], harness.target.policy) == (None, "round_robin")


@pytest.mark.parametrize("setting", ["mode: advise", "pinned: true"])
async def test_a_pool_that_only_takes_advice_keeps_its_policy(setting: str) -> None:
    harness = Harness(TEXT.replace("auto: {", f"auto: {{{setting}, "))
    pool = await harness.compare()
    assert (pool["decision"]["action"], pool["decision"]["member"]) == ("advise", "prefix_aware")
    assert harness.target.policy == "round_robin"


async def test_a_rollback_holds_the_policy_until_it_is_unpinned() -> None:
    harness = Harness()
    await harness.compare()
    harness.target.apply(load_text(TEXT.encode(), "gateway.yaml", {}), "rollback")
    pool = await harness.compare(2000.0)
    assert (pool["held"], pool["decision"]["action"]) == ("rolled back", "advise")
    assert harness.target.policy == "round_robin"
    outcome = await harness.controller.set_pin("chat", is_pinned=False)
    assert outcome.result == "unchanged"
    await harness.compare(4000.0)
    assert harness.target.policy == "prefix_aware"


async def test_an_operators_change_of_the_policy_is_followed_and_holds_nothing() -> None:
    harness = Harness()
    text = TEXT.replace("policy: round_robin", "policy: least_loaded").encode()
    harness.target.apply(load_text(text, "gateway.yaml", {}), "file")
    (pool,) = harness.controller.as_json()["pools"]
    assert (pool["policy"], pool["held"]) == ("least_loaded", "")


async def test_a_pin_is_a_version_too() -> None:
    harness = Harness()
    outcome = await harness.controller.set_pin("chat", is_pinned=True)
    assert (outcome.result, harness.target.version) == ("applied", 2)
    pool = await harness.compare()
    assert (pool["pinned"], pool["decision"]["action"]) == (True, "advise")
    with pytest.raises(UnknownPoolError, match="no pool named 'other'"):
        await harness.controller.set_pin("other", is_pinned=True)


@pytest.mark.parametrize("state", ["ejected", "draining", "drained", "dead"])
async def test_a_comparison_ends_when_an_endpoint_fails_or_is_drained(state: str) -> None:
    started = asyncio.Event()

    async def run(_: ReplayJob) -> ReplayAnswer:
        started.set()
        await asyncio.sleep(3600)
        raise AssertionError

    harness = Harness(run=run)
    await harness.controller.tick(monotonic() + 1000)
    await started.wait()
    comparison = harness.controller._comparison
    assert comparison is not None
    harness.target.state = state
    await harness.controller.tick(monotonic() + 1001)
    await asyncio.wait([comparison])
    assert comparison.cancelled()
    (pool,) = harness.controller.as_json()["pools"]
    assert pool["trouble"] == f"endpoint e0 is {state}"
    started.clear()
    await harness.controller.tick(monotonic() + 5000)
    assert harness.controller._comparison is comparison


async def test_a_canary_or_a_shadow_is_left_alone() -> None:
    for trial in ("canary: {policy: priced, percent: 5}", "shadow: [priced]"):
        harness = Harness(f"{TEXT}    {trial}\n")
        pool = await harness.compare()
        assert pool["decision"] is None
        assert trial.partition(":")[0] in pool["trouble"]


async def test_a_trial_in_one_pool_does_not_keep_others_from_being_compared() -> None:
    other = TEXT.partition("pools:\n")[2].replace("chat", "other").replace("9001", "9002")
    models = "models: [{name: a, pool: chat}, {name: b, pool: other}]\n"
    harness = Harness(f"{TEXT}{other.replace('e0', 'e1')}    shadow: [priced]\n{models}")
    await harness.controller.tick(monotonic() + 1000)
    assert harness.controller._comparison is not None
    await asyncio.wait([harness.controller._comparison])
    assert harness.target.policy == "prefix_aware"


async def test_a_failed_replay_changes_nothing_and_is_tried_less_and_less_often() -> None:
    runs = 0

    async def run(_: ReplayJob) -> ReplayAnswer:
        nonlocal runs
        runs += 1
        raise ReplayError("the replay process ended with status 1")

    harness = Harness(run=run)
    pool = await harness.compare()
    assert pool["failure"] == "the replay process ended with status 1"
    await harness.compare(later_s=500.0)
    assert runs == 1  # the next one is due after twice the interval
    await harness.compare(later_s=700.0)
    assert runs == 2
    assert harness.metrics.comparisons.labels("chat", "failed").value == 2
    assert harness.target.policy == "round_robin"


async def test_an_estimate_of_an_older_configuration_is_not_used() -> None:
    async def run(job: ReplayJob) -> ReplayAnswer:
        text = TEXT.replace("name: e0", "name: e9").encode()
        harness.target.apply(load_text(text, "gateway.yaml", {}), "file")
        return await answer_better(job)

    harness = Harness(run=run)
    pool = await harness.compare()
    assert (pool["decision"], harness.target.policy) == (None, "round_robin")


async def test_pools_that_share_a_setting_in_the_text_are_not_changed_together() -> None:
    text = """version: 1
observability: {access_log: /tmp/access.jsonl}
models: [{name: a, pool: chat}, {name: b, pool: other}]
pools:
  chat:
    auto: &same {portfolio: [prefix_aware]}
    endpoints: [{url: "http://127.0.0.1:9001", name: e0}]
  other:
    auto: *same
    endpoints: [{url: "http://127.0.0.1:9002"}]
"""
    harness = Harness(text)
    outcome = await harness.controller.set_pin("chat", is_pinned=True)
    assert outcome.result == "rejected"
    assert "pools.other.auto.pinned" in outcome.message
    assert harness.target.version == 1


async def test_the_job_has_no_keys_and_names_endpoints_in_order() -> None:
    jobs: list[ReplayJob] = []

    async def run(job: ReplayJob) -> ReplayAnswer:
        jobs.append(job)
        return await answer_better(job)

    tenant = "tenants: [{name: t, key: '0123456789abcdef0123', weight: 2}]\n"
    harness = Harness(f"{TEXT}{tenant}", run)
    await harness.compare()
    (job,) = jobs
    assert "0123456789abcdef0123" not in str(job)
    assert job.config["tenants"] == [{"name": "t", "weight": 2.0}]
    (pool,) = job.pools
    assert pool.endpoints == ("e0",)
    assert [member.label for member in pool.members] == ["round_robin", "prefix_aware"]
    assert job.cpu_share == 0.05


@pytest.mark.parametrize(("stated", "replayed"), [("", 90_000), (", kv_tokens: 60000", 60_000)])
async def test_a_replay_has_the_kv_size_that_the_engine_reports_unless_the_file_states_one(
    stated: str, replayed: int
) -> None:
    jobs: list[ReplayJob] = []

    async def run(job: ReplayJob) -> ReplayAnswer:
        jobs.append(job)
        return await answer_better(job)

    await Harness(TEXT.replace("name: e0", f"name: e0{stated}"), run).compare()
    (endpoint,) = jobs[0].config["pools"]["chat"]["endpoints"]
    assert endpoint["kv_tokens"] == replayed


async def test_a_request_is_counted_by_one_comparison_only() -> None:
    jobs: list[ReplayJob] = []

    async def run(job: ReplayJob) -> ReplayAnswer:
        jobs.append(job)
        (pool,) = job.pools
        members = tuple(
            MemberEstimate(member.label, 0.5, gains=() if index == 0 else (0.0,) * 8)
            for index, member in enumerate(pool.members)
        )
        until_s = 5000.0 + len(jobs)
        estimate = PoolEstimate("chat", pool.members[0].label, 1000, 600.0, "", members, until_s)
        return ReplayAnswer((estimate,), {}, 2.0)

    harness = Harness(run=run)
    for later_s in (1000.0, 3000.0, 5000.0):
        await harness.compare(later_s)
    assert [job.pools[0].counts_from_s for job in jobs] == [0.0, 5001.0, 5002.0]
