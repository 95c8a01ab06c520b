"""Tests of the parts of a configuration reload: changes, saved versions, automatic rollback."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import App
from gateway.config import AutoRollback, LoadedConfig, config_from_engines, load_text
from gateway.config.diff import diff, display
from gateway.metrics.catalogue import Metrics
from gateway.protocol.request.service_level_headers import ServiceClasses
from gateway.reload import file_watcher
from gateway.reload.auto_rollback import (
    AutoRollbackMonitor,
    FailureCount,
    count_failures,
    regression,
)
from gateway.reload.file_watcher import FileWatcher
from gateway.reload.history import MAX_VERSIONS, VersionHistory, create_version
from gateway.reload.snapshot_gc import SnapshotGc
from gateway.restart.start_options import StartOptions
from gateway.restart.worker_launch_settings import WorkerSettings
from gateway.routes_and_snapshot import Snapshot
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

BASE = """\
version: 1
models:
  - {name: m, pool: chat}
pools:
  chat:
    policy: prefix_aware
    endpoints:
      - {name: a, url: "http://h:1"}
      - {name: b, url: "http://h:2"}
"""
OTHER = BASE.replace("prefix_aware", "least_loaded")


def loaded(text: str, **env: str) -> LoadedConfig:
    return load_text(text.encode(), "g.yaml", env)


def reply(
    old: str, new: str, env: dict[str, str] | None = None, after: dict[str, str] | None = None
) -> list[str]:
    before = loaded(old, **(env or {}))
    return [str(change) for change in diff(before, loaded(new, **(after or env or {})))]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "policy: prefix_aware",
            "policy: least_loaded",
            ["pools.chat.policy: prefix_aware -> least_loaded"],
        ),
        ("policy: prefix_aware", "policy: {name: prefix_aware}", []),
        (
            "policy: prefix_aware",
            "policy: {name: least_loaded, parameters: {fresh_s: 2.0}}",
            ["pools.chat.policy: prefix_aware -> {name: least_loaded, parameters: {fresh_s: 2.0}}"],
        ),
        ("- {name: b, url", "- {name: c, url", ["pools.chat.endpoints.c.name: b -> c"]),
        (
            '- {name: b, url: "http://h:2"}',
            '- {name: b, url: "http://h:3"}',
            [
                "pools.chat.endpoints.b: removed http://h:2",
                "pools.chat.endpoints.b: added http://h:3",
            ],
        ),
        (
            "{name: m, pool: chat}",
            "{name: m, pool: chat, aliases: [x, y]}",
            ["models.m.aliases: [] -> [x, y]"],
        ),
        ("version: 1", "version: 1\ntimeouts: {connect: 1000ms}", []),
        ("version: 1", "version: 1\ntimeouts: {connect: 2s}", ["timeouts.connect: 1s -> 2s"]),
        ("version: 1", "version: 1\nreload: {watch: false}", ["reload.watch: true -> false"]),
        (
            "version: 1",
            "version: 1\nreload: {auto_rollback: {window: 5s}}",
            ["reload.auto_rollback: none -> {window: 5s}"],
        ),
        (
            "version: 1",
            "version: 1\ntenants: [{name: t, key: sk-1}]",
            ["tenants.t: added {name: t, key: **********}"],
        ),
    ],
)
def test_a_change_is_described_by_path_and_values(old: str, new: str, expected: list[str]) -> None:
    result = reply(BASE, BASE.replace(old, new))
    assert sorted(result) == sorted(expected)


def test_a_changed_secret_is_a_change_without_visible_values() -> None:
    text = BASE + "tenants: [{name: t, key: '${KEY}'}]\n"
    assert reply(text, text, {"KEY": "sk-old"}, {"KEY": "sk-new"}) == [
        "tenants.t.key: ${KEY} has another value now"
    ]
    clear = BASE + "tenants: [{name: t, key: sk-old}]\n"
    assert reply(clear, clear.replace("sk-old", "sk-new")) == [
        "tenants.t.key: ********** has another value now"
    ]


def test_what_is_shown_has_every_default_and_no_resolved_reference() -> None:
    result = display(
        loaded(
            BASE.replace("name: a", "name: '${WHO}'") + "admin: {key: '${KEY}'}\n",
            WHO="x",
            KEY="sk-1",
        )
    )
    assert result["pools"]["chat"]["endpoints"][0]["name"] == "${WHO}"
    assert result["admin"]["key"] == "${KEY}"
    assert result["timeouts"]["connect"] == 1.0


def test_engines_of_the_command_line_have_a_text_that_reads_back() -> None:
    begun = config_from_engines(["http://h:1"], "least_loaded", "127.0.0.1", 0, 0)
    assert diff(begun, load_text(begun.text, "x", {})) == ()


def test_the_last_twenty_versions_are_on_disk_readable_by_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    versions = VersionHistory(folder)
    for number in range(1, MAX_VERSIONS + 6):
        version = create_version(number, 1.0, "file", loaded(BASE + f"# {number}\n"), ())
        versions.add(version)
        versions.write(version, has_secret=number == MAX_VERSIONS)
    again = VersionHistory(folder)
    assert [item.number for item in again.all()] == list(range(6, MAX_VERSIONS + 6))
    assert again.all()[-1] == versions.all()[-1]
    secret = again.find(MAX_VERSIONS)
    assert secret is not None
    assert secret.text is None, "a text with a secret in it stays in memory"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_damaged_version_is_ignored(tmp_path: Path) -> None:
    versions = VersionHistory(tmp_path)
    versions.write(create_version(1, 1.0, "file", loaded(BASE), ()), has_secret=False)
    (tmp_path / "v00000002.json").write_text("{")
    assert [version.number for version in VersionHistory(tmp_path).all()] == [1]


async def test_version_numbers_continue_after_a_restart_and_can_be_rolled_back_to(
    tmp_path: Path,
) -> None:
    more = f"reload: {{state_dir: {tmp_path}/state}}\n"
    async with running(tmp_path, more=more) as first:
        text = first.text() + more
        await first.put(text.replace("prefix_aware", "least_loaded"))
        port = first.members[0].url
    async with running(tmp_path, more=more) as second:
        history = (await second.asked("GET", "/config/versions"))[2]
        assert [version["version"] for version in history["versions"]] == [3, 2, 1]
        status, _, answer = await second.asked(
            "POST", "/config/rollback", params={"to": "2", "force": "1"}
        )
        assert (status, answer["version"]) == (200, 4)
        assert second.app.gateway.snapshot.policies["chat"].name == "least_loaded"
        assert port in {live.endpoint.url for live in second.app.gateway.endpoints.all()}


@pytest.mark.parametrize(
    "kept",
    [
        [],
        [(3, OTHER)],
        [(4, OTHER), (3, BASE)],
        [(4, OTHER), (5, BASE)],
        [(6, OTHER)],
        [(7, OTHER), (8, BASE)],
    ],
    ids=[
        "nothing",
        "older",
        "older_and_equal",
        "just_before_and_equal",
        "another",
        "newer_that_all_went_back_from",
    ],
)
async def test_a_restarted_worker_uses_the_version_number_of_the_other_workers(
    tmp_path: Path, kept: list[tuple[int, str]]
) -> None:
    state = tmp_path / "state"
    more = f"reload: {{state_dir: {state}}}\n"
    for number, text in kept:
        VersionHistory(state).write(
            create_version(number, 1.0, "file", loaded(text + more), ()), has_secret=False
        )
    running = loaded(BASE + more)
    workers = [
        App(running.config, StartOptions(running, local=local(number, version=6)))
        for number in range(2)
    ]
    assert [worker.reloader.version.number for worker in workers] == [6, 6]
    assert [worker.reloader.history.next_number for worker in workers] == [7, 7]
    assert [version.hash for version in VersionHistory(state).all() if version.number == 6] == [
        workers[1].reloader.version.hash
    ]


async def test_the_first_worker_continues_the_version_numbers_of_the_folder(tmp_path: Path) -> None:
    running = loaded(BASE + f"reload: {{state_dir: {tmp_path}}}\n")
    VersionHistory(tmp_path).write(
        create_version(4, 1.0, "file", loaded(OTHER), ()), has_secret=False
    )
    assert (
        App(running.config, StartOptions(running, local=local(0, None))).reloader.version.number
        == 5
    )
    assert (
        App(running.config, StartOptions(running, local=local(0, None))).reloader.version.number
        == 5
    )


def local(number: int, version: int | None) -> WorkerSettings:
    return WorkerSettings("hub", b"secret" * 6, number, "admin", version, ())


def snapshot(generation: int) -> Snapshot:
    config = loaded(BASE).config
    return Snapshot(generation, config, {}, {}, {}, ServiceClasses(config))


def test_what_a_snapshot_needs_is_freed_once_it_and_all_older_ones_are_unused() -> None:
    generations, done = SnapshotGc(), []
    first, second = snapshot(1), snapshot(2)
    generations.track(first)
    generations.when_gone(1, lambda: done.append(1))
    generations.track(second)
    generations.when_gone(2, lambda: done.append(2))
    assert generations.take_due() == []
    del second
    assert generations.take_due() == [], "the first may still need what left with the second"
    del first
    for action in generations.take_due():
        action()
    assert (done, generations.pending_actions) == ([1, 2], 0)


LIMITS = AutoRollback(window="60s", error_ratio=0.05, requests=20)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_a_change_is_a_regression_only_if_enough_requests_fail_more_often(
    a: int, b: int, c: int, d: int
) -> None:
    before, after = FailureCount(a + b, b), FailureCount(c + d, d)
    reason = regression(before, after, LIMITS)
    assert (reason is not None) == (c + d >= 20 and after.ratio > before.ratio + 0.05)


def test_client_errors_and_sheds_are_no_failures() -> None:
    metrics = Metrics()
    for code, reason, count in (
        ("200", "served", 5),
        ("200", "reset", 2),
        ("502", "x", 3),
        ("429", "full", 7),
    ):
        metrics.requests_total.labels("m", code, reason).inc(count)
    metrics.requests_total.labels("m", "499", "decode").inc(1)
    assert count_failures(metrics) == FailureCount(18, 5)


async def look(harness: Running, now: float) -> bool:
    return await harness.app._trial.check(now)


async def test_a_change_after_which_more_requests_fail_is_rolled_back(tmp_path: Path) -> None:
    more = "reload: {auto_rollback: {window: 60s, error_ratio: 0.1, requests: 10}}\n"
    async with running(tmp_path, more=more) as harness:
        trial: AutoRollbackMonitor = harness.app._trial
        good = harness.app.metrics.requests_total.labels("m", "200", "served")
        bad = harness.app.metrics.requests_total.labels("m", "502", "upstream_failed")
        await look(harness, 0.0)
        good.inc(100)
        changed = (harness.text() + more).replace("prefix_aware", "least_loaded")
        assert (await harness.put(changed))[0] == 200
        begun = trial._change
        assert begun is not None
        bad.inc(9)
        assert not await look(harness, begun.applied_at + 1), "too few to tell"
        bad.inc(9)
        assert await look(harness, begun.applied_at + 2)
        version = harness.app.reloader.version
        assert (version.trigger, version.number) == ("auto_rollback", 3)
        assert harness.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
        assert any(
            "v2 increased failures: 100.0% of 18 requests failed since" in line
            for line in harness.said
        )
        bad.inc(50)
        assert not await look(harness, begun.applied_at + 3), "what went back is not judged again"


async def test_a_change_without_failures_in_its_window_stays(tmp_path: Path) -> None:
    more = "reload: {auto_rollback: {window: 10s, requests: 10}}\n"
    async with running(tmp_path, more=more) as harness:
        await harness.put((harness.text() + more).replace("prefix_aware", "least_loaded"))
        begun = harness.app._trial._change
        assert begun is not None
        assert not await look(harness, begun.applied_at + 11)
        harness.app.metrics.requests_total.labels("m", "502", "x").inc(100)
        assert not await look(harness, begun.applied_at + 12)
        assert harness.app.reloader.version.number == 2


async def test_a_failed_rollback_is_not_counted_as_a_rollback(tmp_path: Path) -> None:
    more = "reload: {auto_rollback: {window: 60s, error_ratio: 0.1, requests: 10}}\n"
    async with running(tmp_path, more=more) as harness:
        await look(harness, 0.0)
        assert (await harness.put((harness.text() + more).replace("prefix_aware", "least_loaded")))[
            0
        ] == 200
        begun = harness.app._trial._change
        assert begun is not None
        harness.app.reloader.history._versions[0] = msgspec.structs.replace(
            harness.app.reloader.history._versions[0], text=None
        )
        harness.app.metrics.requests_total.labels("m", "502", "upstream_failed").inc(20)
        assert await look(harness, begun.applied_at + 1)
        assert any(
            "v2 was not rolled back: the text of version 1 was not kept" in line
            for line in harness.said
        )
        assert harness.app.metrics.config_reload_total.labels("rolled_back").value == 0


class Touched:
    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.running = loaded(BASE)
        self.told = asyncio.Semaphore(0)

    async def reload_changed_files(self) -> None:
        self.told.release()


async def test_the_first_poll_counts_as_a_change_and_an_invalid_path_as_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watcher, "POLL_S", 0.01)
    followed = Touched(tmp_path / "gateway.yaml", Path("no\0name"))
    following = FileWatcher(followed)
    await following.start()
    async with asyncio.timeout(PATIENCE_S):
        await followed.told.acquire()
        (tmp_path / "gateway.yaml").write_text(BASE)
        await followed.told.acquire()
    await following.stop()
    assert followed.told.locked()
