"""Tests that a configuration change is applied completely or not at all.

Running requests are not affected.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.app import App
from gateway.config import Config, config_from_engines
from gateway.config.yaml_source import MAX_FILE_BYTES
from gateway.reload import dry_run_and_swap
from gateway.reload.file_watcher import POLL_S
from gateway.reload.reloader import ChangeOptions
from gateway.reload.snapshot_plan import SnapshotPlan
from gateway.restart.start_options import StartOptions
from tests.duration_limits import PATIENCE_S, at_most
from tests.unit.gateway.reload.running import Running, dumped, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

FORCE = ChangeOptions(force=True)
LEAST = ("policy: prefix_aware", "policy: least_loaded")


def kept_state(harness: Running) -> dict[str, Any]:
    # Return all learned and live state, which a reload must not change.
    table = harness.app.gateway.endpoints
    index = table.prefixes.index
    return {
        "lives": [
            (id(live), id(live.load), id(live.upstream), live.load.slot) for live in table.all()
        ],
        "health": [live.health for live in table.all()],
        "loads": [
            (live.load.in_flight, live.load.prefill_tokens, live.load.decode_tokens)
            for live in table.all()
        ],
        "held": index.stats().cached_tokens,
        "blocks": index.stats().blocks,
        "shards": [dict(shard) for shard in index._shards],
        "rooms": [
            (id(room), room.in_flight, room.queue_length)
            for room in harness.app.gateway.gate.pool_queues()
        ],
        "splitting": dict(harness.app.gateway.handoffs.splitting),
    }


async def test_a_saved_file_is_applied_within_a_second_and_reported_in_one_line(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, poll_s=POLL_S) as harness:
        harness.write(harness.text().replace(*LEAST))
        async with at_most(1.0):
            await harness.hears("reloaded")
        (line,) = harness.said
        assert line.startswith("reloaded gateway.yaml v2 (1 change: pools.chat.policy) in ")
        assert line.endswith(" ms, 0 requests affected")
        assert harness.app.gateway.snapshot.policies["chat"].name == "least_loaded"
        harness.write(harness.text())
        await harness.hears("v3 (1 change: pools.chat.policy)")


async def test_each_listener_limits_the_memory_of_connections_and_follows_a_reload(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        listening = [item for own in harness.app.sockets.values() for item in own]
        assert {item.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for item in listening} == {
            256 * 1024
        }
        sent = "limits: {send_buffer: 64KiB, receive_buffer: 128KiB}\n"
        assert (await harness.put(harness.text() + sent))[0] == 200
        assert {item.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for item in listening} == {
            64 * 1024
        }
        assert {
            item.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) for item in listening
        } == {16 * 1024}
        received = {
            name: {item.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for item in own}
            for name, own in harness.app.sockets.items()
        }
        assert received == {"api": {128 * 1024}, "admin": {256 * 1024}}


async def test_an_edit_between_loading_and_watching_the_file_is_not_missed(tmp_path: Path) -> None:
    async with running(tmp_path, late=LEAST) as harness:
        await harness.hears("v2 (1 change: pools.chat.policy)")
        assert harness.app.gateway.snapshot.policies["chat"].name == "least_loaded"


async def test_live_state_survives_a_new_policy(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        for number in range(20):
            assert await harness.ask(f"{number} " + "shared words " * 100) == "ok"
        before = kept_state(harness)
        assert before["blocks"] > 20
        outcome = await harness.app.reloader.put(harness.text().replace(*LEAST).encode(), "admin")
        assert (outcome.result, kept_state(harness)) == ("applied", before)


async def test_an_unchanged_policy_stays_the_same_object(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        policy = harness.app.gateway.snapshot.policies["chat"]
        assert (await harness.put(harness.text().replace("stall: 60s", "stall: 50s")))[0] == 200
        assert harness.app.gateway.snapshot.policies["chat"] is policy


async def test_a_bad_edit_is_rejected_with_its_place_and_the_old_configuration_stays(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, poll_s=POLL_S) as harness:
        snapshot = harness.app.gateway.snapshot
        harness.write(harness.text().replace("connect: 10s", "connect: 1secs"))
        async with at_most(1.0):
            await harness.hears("rejected")
        (line,) = harness.said
        assert line.startswith(
            "rejected gateway.yaml:15:21 timeouts.connect: '1secs' is not a duration"
        ), line
        assert line.endswith(". Still serving v1.")
        assert harness.app.gateway.snapshot is snapshot
        _, _, reply = await harness.asked("GET", "/config")
        (problem,) = reply["last_error"]["problems"]
        assert (reply["version"], problem["line"], problem["col"]) == (1, 15, 21)
        page = harness.app.metrics.render().decode()
        assert 'penstock_config_reload_total{result="rejected"} 1.0' in page
        assert "penstock_config_last_reload_successful 0.0" in page
        harness.write(harness.text())
        await harness.hears("is already in force: v1")
        assert (await harness.asked("GET", "/config"))[2]["last_error"] is None
        assert "penstock_config_last_reload_successful 1.0" in harness.app.metrics.render().decode()


async def test_a_configmap_swap_of_links_is_detected_with_its_secret(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        text = harness.text() + "tenants: [{name: a, key: '${file:team-key}'}]\n"
        for name, key in (("one", "sk-one"), ("two", "sk-two")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "gateway.yaml").write_text(text)
            (tmp_path / name / "team-key").write_text(f"{key}\n")
        (tmp_path / "..data").symlink_to("one")
        for name in ("gateway.yaml", "team-key"):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(f"..data/{name}")
        await harness.hears("v2 (1 change: tenants.a)")
        harness.said.clear()
        (tmp_path / "..data.new").symlink_to("two")
        (tmp_path / "..data.new").replace(tmp_path / "..data")
        async with at_most(1.0):
            await harness.hears("v3 (1 change: tenants.a.key)")
        harness.http.headers["Authorization"] = "Bearer sk-two"
        assert await harness.ask() == "ok"
        harness.http.headers["Authorization"] = "Bearer sk-one"
        assert (await harness.ask()).startswith("401")


async def test_a_half_written_file_is_not_read(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=POLL_S) as harness:
        whole = harness.text().replace(*LEAST)
        with harness.file.open("w") as file:
            for start in range(0, len(whole), 60):
                file.write(whole[start : start + 60])
                file.flush()
                os.fsync(file.fileno())
                await asyncio.sleep(0.06)
        await harness.hears("v2")
        assert [
            line for line in harness.said if "v2 (1 change: pools.chat.policy)" not in line
        ] == []


async def test_a_missing_or_truncated_file_leaves_the_old_configuration(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        harness.file.unlink()
        await harness.hears(
            "rejected gateway.yaml:1:1 the configuration file cannot be read: No such file or directory. Still serving v1."
        )
        harness.write(harness.text()[:250])
        await harness.hears("rejected gateway.yaml:")
        assert await harness.ask() == "ok"
        harness.write(harness.text().replace(*LEAST))
        await harness.hears("reloaded gateway.yaml v2")


async def test_a_file_is_applied_once_its_missing_secret_appears(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        harness.write(harness.text() + "tenants: [{name: a, key: '${file:later}'}]\n")
        await harness.hears("tenants[0].key: later cannot be read")
        (tmp_path / "later").write_text("sk-later")
        await harness.hears("reloaded gateway.yaml v2")


async def test_an_etag_that_is_not_in_force_is_a_conflict_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        _, headers, _ = await harness.asked("GET", "/config")
        mine = {"If-Match": headers["ETag"]}
        changed = harness.text().replace(*LEAST)
        assert (await harness.put(changed, headers=mine))[0] == 200
        status, reply = await harness.put(harness.text(), headers=mine)
        assert (status, reply["result"], reply["version"]) == (412, "conflict", 2)
        assert harness.app.gateway.snapshot.policies["chat"].name == "least_loaded"
        assert (await harness.put(harness.text(), headers={"If-Match": "*"}))[0] == 200


async def test_concurrent_changes_are_applied_in_turn_and_the_last_one_stays(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        texts = [harness.text().replace("stall: 60s", f"stall: {10 + n}s") for n in range(6)]
        outcomes = await asyncio.gather(
            *(harness.app.reloader.put(text.encode(), "admin") for text in texts)
        )
        assert [outcome.version.number for outcome in outcomes] == [2, 3, 4, 5, 6, 7]
        assert harness.app.gateway.snapshot.config.timeouts.stall == 15.0


async def test_a_dry_run_reports_every_change_and_makes_none(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        snapshot = harness.app.gateway.snapshot
        wanted = (
            harness.text(0)
            .replace(*LEAST)
            .replace("port: 0", "port: 1", 1)
            .replace("stall: 60s, ", "")
        )
        status, reply = await harness.put(wanted, params={"dry_run": "1"})
        assert (status, reply["result"], reply["needs_restart"]) == (
            200,
            "dry_run",
            ["listeners.api.port"],
        )
        assert [change["text"] for change in reply["changes"]] == [
            "listeners.api.port: 0 -> 1",
            "pools.chat.policy: prefix_aware -> least_loaded",
            f"pools.chat.endpoints.group-1: removed {harness.members[1].url}",
        ]
        assert harness.app.gateway.snapshot is snapshot
        status, reply = await harness.put("version: 2\n", params={"dry_run": "1"})
        assert (status, reply["problems"][0]["line"]) == (400, 1)
        assert (await harness.asked("GET", "/config"))[2]["last_error"] is None


async def test_a_rollback_is_a_new_version_with_an_old_text(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        await harness.put(harness.text().replace(*LEAST))
        status, _, reply = await harness.asked("POST", "/config/rollback", params={"to": "1"})
        assert (status, reply["version"], reply["changes"][0]["text"]) == (
            200,
            3,
            "pools.chat.policy: least_loaded -> prefix_aware",
        )
        status, _, reply = await harness.asked("GET", "/config/versions")
        assert [(version["version"], version["source"]) for version in reply["versions"]] == [
            (3, "rollback"),
            (2, "admin"),
            (1, "start"),
        ]
        assert (await harness.asked("POST", "/config/rollback", params={"to": "9"}))[0] == 409
        assert (await harness.asked("POST", "/config/rollback", params={"to": "x"}))[0] == 400


async def test_a_changed_port_is_accepted_and_reported_to_need_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        harness.write(harness.text().replace("api: {port: 0}", "api: {port: 18080}"))
        await harness.hears("0 requests affected; needs a restart: listeners.api.port")
        assert (await harness.asked("GET", "/config"))[2]["needs_restart"] == ["listeners.api.port"]
        assert await harness.ask() == "ok"
        harness.write(harness.text())
        await harness.hears("v3")
        assert (await harness.asked("GET", "/config"))[2]["needs_restart"] == []


CANARY = "canary-7d1f"


async def test_no_secret_is_in_any_page_message_version_or_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(f"file-{CANARY}-1")
    more = (
        f"tenants:\n  - {{name: plain, key: plain-{CANARY}-1}}\n  - {{name: ref, key: '${{file:key}}'}}\n"
        f"  - {{name: default, key: '${{NONE:-default-{CANARY}}}'}}\nreload: {{state_dir: {tmp_path}/state}}\n"
    )
    async with running(tmp_path, more=more) as harness:
        observed = []
        (tmp_path / "key").write_text(f"file-{CANARY}-2")
        await harness.hears("tenants.ref.key")
        changed = (harness.text() + more).replace(f"plain-{CANARY}-1", f"plain-{CANARY}-2")
        observed.append(dumped(await harness.put(changed, params={"dry_run": "1"})))
        observed.append(dumped(await harness.put(changed)))
        engine = (
            harness.text(0).replace("name: group-0", "name: group-0, api_key: '${file:key}'") + more
        )
        harness.write(engine)  # a reference at a new place is refused over HTTP
        await harness.hears("api_key")
        observed.append(dumped(await harness.put(engine)))
        for place in (
            "labels: {x: '${file:key}'}",
            "role: '${file:key}'",
            "max_concurrency: '${file:key}'",
        ):
            status, reply = await harness.put(engine.replace("api_key: '${file:key}'", place))
            assert status == 400, reply
            observed.append(dumped([status, reply]))
        observed.append(dumped(await harness.put(engine.replace("key: plain-", "key: [plain-"))))
        observed += [
            dumped(await harness.asked("GET", path))
            for path in ("/config", "/config/versions", "/endpoints")
        ]
        async with harness.http.get(harness.app.admin_url + "/metrics") as page:
            observed.append(await page.text())
        observed += [path.read_text() for path in (tmp_path / "state").iterdir()]
        reply = "\n".join([*observed, *harness.said, caplog.text])
        assert "tenants.plain.key" in reply
        assert "added ${file:key}" in reply or "none -> ${file:key}" in reply
        assert CANARY not in reply


async def test_a_poll_of_the_files_does_not_restore_a_replaced_text(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=3600.0) as harness:
        await harness.put(harness.text(0))
        looking = asyncio.create_task(harness.app.reloader.reload_changed_files())
        await asyncio.sleep(0)  # the reload reads the file, and later ones wait for it
        assert (
            await harness.app.reloader.put(harness.text(1).encode(), "admin")
        ).result == "applied"
        await looking
        assert harness.app.reloader.running.text == harness.text(1).encode()


async def test_a_gateway_without_a_file_can_be_changed_and_rolled_back(tmp_path: Path) -> None:
    lines: list[str] = []
    begun = config_from_engines(["http://127.0.0.1:9"], "least_loaded", "127.0.0.1", 0, 0)
    app = App(begun.config, StartOptions(begun, None, {}, lambda line, bad: lines.append(line)))
    assert (await app.reloader.reload("signal")).result == "nothing"
    text = "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\npools: {engines: {endpoints: [{url: 'http://h:9'}]}}"
    outcome = await app.reloader.put(text.encode(), "admin", options=FORCE)
    assert (outcome.result, [change.path for change in outcome.changes]) == (
        "applied",
        [
            "pools.engines.policy",
            "pools.engines.endpoints.127.0.0.1:9",
            "pools.engines.endpoints.h:9",
        ],
    )
    assert (await app.reloader.rollback(1, options=FORCE)).result == "applied"
    assert app.gateway.snapshot.policies["engines"].name == "least_loaded"
    assert [line.split(" (")[0] for line in lines] == [
        "reloaded PUT config v2",
        "reloaded command line v3",
    ]


async def test_a_pool_may_have_another_name_where_the_engines_name_the_models(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        without = harness.text().replace("models:\n  - {name: demo-8b, pool: chat}\n", "")
        assert (await harness.put(without))[0] == 200
        assert await harness.ask() == "ok"
        status, reply = await harness.put(without.replace("  chat:\n", "  talk:\n"))
        assert (status, reply["result"]) == (200, "applied")
        async with asyncio.timeout(PATIENCE_S):
            while (route := harness.app.gateway.snapshot.routes.get("demo-8b")) is None:
                await asyncio.sleep(0.01)
        assert route.pool == "talk"


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        (
            {"Content-Encoding": "gzip"},
            b"version: 1",
            400,
            "the text is incomplete, or not encoded",
        ),
        ({}, b"#" * (MAX_FILE_BYTES + 2), 413, "the text is larger than 1 MiB"),
    ],
)
async def test_an_unreadable_text_is_rejected_in_the_shape_of_all_outcomes(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, message: str
) -> None:
    async with running(tmp_path) as harness:
        result, _, reply = await harness.asked("PUT", "/config", data=body, headers=headers)
        assert (result, reply["result"], reply["problems"], reply["changes"]) == (
            status,
            "rejected",
            [],
            [],
        )
        assert message in reply["message"]


async def test_a_policy_that_fails_its_trial_pick_is_rejected_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with running(tmp_path) as harness:
        before = harness.app.gateway.snapshot
        monkeypatch.setattr(dry_run_and_swap.routing_algorithm, "pick", broken)
        status, reply = await harness.put(harness.text().replace(*LEAST))
        monkeypatch.undo()
        assert (status, reply["problems"][0]["line"], reply["problems"][0]["col"]) == (400, 10, 13)
        assert "least_loaded failed at a trial pick: ZeroDivisionError()" in reply["message"]
        assert harness.app.gateway.snapshot is before
        assert await harness.ask() == "ok"


async def test_a_changed_secret_after_a_rollback_does_not_restore_the_files_text(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        secret = tmp_path / "team-key"
        secret.write_text("sk-one\n")
        text = harness.text() + "tenants: [{name: a, key: '${file:team-key}'}]\n"
        harness.write(text)
        await harness.hears("v2 (1 change: tenants.a)")
        harness.write(text.replace(*LEAST))
        await harness.hears("v3 (1 change")
        assert (await harness.asked("POST", "/config/rollback"))[0] == 200
        harness.said.clear()
        secret.write_text("sk-two\n")
        await harness.hears("v5 (1 change: tenants.a.key)")
        assert harness.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
        assert (await harness.put("version: 2"))[0] == 400
        harness.write(text.replace(*LEAST))
        touched = await harness.app.reloader.reload_changed_files()
        assert touched is None or touched.result == "unchanged"
        assert harness.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
        harness.write(text.replace(*LEAST) + "# edited\n")
        await harness.hears("v6 (1 change: pools.chat.policy)")


async def test_a_rejected_file_stays_rejected_while_another_text_is_in_force(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        assert (await harness.put(harness.text().replace(*LEAST)))[0] == 200
        harness.write("version: 2\n")
        await harness.hears("rejected gateway.yaml")
        for _ in range(2):
            await harness.app.reloader.reload_changed_files()
            assert harness.app.reloader.last_error is not None


async def test_endpoints_discovered_while_a_reload_is_planned_are_kept_with_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as harness:
        app, plan = harness.app, harness.app.swap.plan
        generation = app.gateway.snapshot.generation
        rebuilds: list[asyncio.Task[None]] = []

        async def plan_beside_a_discovery(config: Config) -> SnapshotPlan:
            rebuilds.append(asyncio.create_task(app.swap.rebuild()))
            await asyncio.sleep(0.01)
            assert app.gateway.snapshot.generation == generation, "the discovery waits"
            return await plan(config)

        monkeypatch.setattr(app.swap, "plan", plan_beside_a_discovery)
        outcome = await harness.put(harness.text().replace(*LEAST))
        assert outcome[1]["result"] == "applied"
        await asyncio.gather(*rebuilds)
        assert app.gateway.snapshot.generation == generation + 2
        assert app.gateway.snapshot.policies["chat"].name == "least_loaded"
        assert await harness.ask() == "ok"
