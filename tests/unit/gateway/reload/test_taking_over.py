"""A change is taken over whole or not at all, whoever brings it, and nobody who is being served notices."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from gateway.app import App, Origin
from gateway.config import from_engines
from gateway.config.source import FILE_CAP_BYTES
from gateway.reload import swap
from gateway.reload.follow import POLL_S
from gateway.reload.reloader import ChangeOptions
from tests.fair_time import PATIENCE_S, Stopwatch, at_most, pace
from tests.unit.gateway.reload.running import Running, dumped, running

FORCE = ChangeOptions(force=True)
LEAST = ("policy: prefix_aware", "policy: least_loaded")


def learnt(made: Running) -> dict[str, Any]:
    """Everything live that a reload may not touch."""
    table = made.app.gateway.endpoints
    index = table.prefixes.index
    return {
        "lives": [(id(live), id(live.load), id(live.upstream), live.load.slot) for live in table.all()],
        "health": [live.health for live in table.all()],
        "loads": [(live.load.in_flight, live.load.prefill_tokens, live.load.decode_tokens) for live in table.all()],
        "held": index.stats().held_tokens,
        "blocks": index.stats().blocks,
        "shards": [dict(shard) for shard in index._shards],
        "rooms": [(id(room), room.in_flight, room.waiting) for room in made.app.gateway.gate.rooms()],
        "splitting": dict(made.app.gateway.handoffs.splitting),
    }


async def test_a_saved_file_is_taken_over_within_a_second_and_said_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=POLL_S) as made:
        made.write(made.text().replace(*LEAST))
        async with at_most(1.0):
            await made.hears("reloaded")
        (line,) = made.said
        assert line.startswith("reloaded gateway.yaml v2 (1 change: pools.chat.policy) in ")
        assert line.endswith(" ms, 0 requests affected")
        assert made.app.gateway.snapshot.policies["chat"].name == "least_loaded"
        made.write(made.text())
        await made.hears("v3 (1 change: pools.chat.policy)")


async def test_each_listener_limits_the_memory_of_connections_and_follows_a_reload(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        listening = [each for own in made.app.sockets.values() for each in own]
        assert {each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in listening} == {256 * 1024}
        assert (await made.put(made.text() + "limits: {send_buffer: 64KiB}\n"))[0] == 200
        assert {each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in listening} == {64 * 1024}
        assert {each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) for each in listening} == {16 * 1024}


async def test_an_edit_between_reading_the_file_and_following_it_is_not_missed(tmp_path: Path) -> None:
    async with running(tmp_path, late=LEAST) as made:
        await made.hears("v2 (1 change: pools.chat.policy)")
        assert made.app.gateway.snapshot.policies["chat"].name == "least_loaded"


async def test_what_was_learnt_is_the_same_before_and_after_a_new_policy(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        for number in range(20):
            assert await made.ask(f"{number} " + "shared words " * 100) == "ok"
        before = learnt(made)
        assert before["blocks"] > 20
        outcome = await made.app.reloader.put(made.text().replace(*LEAST).encode(), "admin")
        assert (outcome.result, learnt(made)) == ("applied", before)


async def test_a_policy_that_stays_as_it_was_stays_the_one_it_was(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        policy = made.app.gateway.snapshot.policies["chat"]
        assert (await made.put(made.text().replace("stall: 60s", "stall: 50s")))[0] == 200
        assert made.app.gateway.snapshot.policies["chat"] is policy


async def test_a_bad_edit_is_refused_with_its_place_and_the_last_good_one_serves_on(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=POLL_S) as made:
        snapshot = made.app.gateway.snapshot
        made.write(made.text().replace("connect: 10s", "connect: 1secs"))
        async with at_most(1.0):
            await made.hears("rejected")
        (line,) = made.said
        assert line.startswith("rejected gateway.yaml:15:21 timeouts.connect: '1secs' is not a duration"), line
        assert line.endswith(". Still serving v1.")
        assert made.app.gateway.snapshot is snapshot
        _, _, told = await made.asked("GET", "/config")
        (problem,) = told["last_error"]["problems"]
        assert (told["version"], problem["line"], problem["col"]) == (1, 15, 21)
        page = made.app.metrics.render().decode()
        assert 'penstock_config_reload_total{result="rejected"} 1.0' in page
        assert "penstock_config_last_reload_successful 0.0" in page
        made.write(made.text())
        await made.hears("says what is in force already: v1")
        assert (await made.asked("GET", "/config"))[2]["last_error"] is None
        assert "penstock_config_last_reload_successful 1.0" in made.app.metrics.render().decode()


async def test_a_configmap_swap_of_links_is_followed_and_so_is_a_secret_it_brings(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        text = made.text() + "tenants: [{name: a, key: '${file:team-key}'}]\n"
        for name, key in (("one", "sk-one"), ("two", "sk-two")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "gateway.yaml").write_text(text)
            (tmp_path / name / "team-key").write_text(f"{key}\n")
        (tmp_path / "..data").symlink_to("one")
        for name in ("gateway.yaml", "team-key"):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(f"..data/{name}")
        await made.hears("v2 (1 change: tenants.a)")
        made.said.clear()
        (tmp_path / "..data.new").symlink_to("two")
        (tmp_path / "..data.new").replace(tmp_path / "..data")
        async with at_most(1.0):
            await made.hears("v3 (1 change: tenants.a.key)")
        made.http.headers["Authorization"] = "Bearer sk-two"
        assert await made.ask() == "ok"
        made.http.headers["Authorization"] = "Bearer sk-one"
        assert (await made.ask()).startswith("401")


async def test_a_file_that_is_being_written_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=POLL_S) as made:
        whole = made.text().replace(*LEAST)
        with made.file.open("w") as file:
            for start in range(0, len(whole), 60):
                file.write(whole[start : start + 60])
                file.flush()
                os.fsync(file.fileno())
                await asyncio.sleep(0.06)
        await made.hears("v2")
        assert [line for line in made.said if "v2 (1 change: pools.chat.policy)" not in line] == []


async def test_a_file_that_vanishes_or_is_cut_short_leaves_the_last_good_one(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        made.file.unlink()
        await made.hears("rejected gateway.yaml:1:1 cannot be read: No such file or directory. Still serving v1.")
        made.write(made.text()[:250])
        await made.hears("rejected gateway.yaml:")
        assert await made.ask() == "ok"
        made.write(made.text().replace(*LEAST))
        await made.hears("reloaded gateway.yaml v2")


async def test_a_secret_that_was_missing_mends_the_file_when_it_appears(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        made.write(made.text() + "tenants: [{name: a, key: '${file:later}'}]\n")
        await made.hears("tenants[0].key: later cannot be read")
        (tmp_path / "later").write_text("sk-later")
        await made.hears("reloaded gateway.yaml v2")


async def test_an_etag_that_is_not_in_force_is_a_conflict_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        _, headers, _ = await made.asked("GET", "/config")
        mine = {"If-Match": headers["ETag"]}
        changed = made.text().replace(*LEAST)
        assert (await made.put(changed, headers=mine))[0] == 200
        status, told = await made.put(made.text(), headers=mine)
        assert (status, told["result"], told["version"]) == (412, "conflict", 2)
        assert made.app.gateway.snapshot.policies["chat"].name == "least_loaded"
        assert (await made.put(made.text(), headers={"If-Match": "*"}))[0] == 200


async def test_several_at_once_take_turns_and_the_last_one_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        texts = [made.text().replace("stall: 60s", f"stall: {10 + n}s") for n in range(6)]
        outcomes = await asyncio.gather(*(made.app.reloader.put(text.encode(), "admin") for text in texts))
        assert [each.version.number for each in outcomes] == [2, 3, 4, 5, 6, 7]
        assert made.app.gateway.snapshot.config.timeouts.stall == 15.0


async def test_a_dry_run_tells_every_change_and_makes_none(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        snapshot = made.app.gateway.snapshot
        wanted = made.text(0).replace(*LEAST).replace("port: 0", "port: 1", 1).replace("stall: 60s, ", "")
        status, told = await made.put(wanted, params={"dry_run": "1"})
        assert (status, told["result"], told["needs_restart"]) == (200, "dry_run", ["listeners.api.port"])
        assert [each["text"] for each in told["changes"]] == [
            "listeners.api.port: 0 -> 1",
            "pools.chat.policy: prefix_aware -> least_loaded",
            f"pools.chat.endpoints.group-1: removed {made.members[1].url}",
        ]
        assert made.app.gateway.snapshot is snapshot
        status, told = await made.put("version: 2\n", params={"dry_run": "1"})
        assert (status, told["problems"][0]["line"]) == (400, 1)
        assert (await made.asked("GET", "/config"))[2]["last_error"] is None


async def test_a_rollback_is_a_new_version_with_an_old_text(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        await made.put(made.text().replace(*LEAST))
        status, _, told = await made.asked("POST", "/config/rollback", params={"to": "1"})
        assert (status, told["version"], told["changes"][0]["text"]) == (
            200,
            3,
            "pools.chat.policy: least_loaded -> prefix_aware",
        )
        status, _, told = await made.asked("GET", "/config/versions")
        assert [(each["version"], each["source"]) for each in told["versions"]] == [
            (3, "rollback"),
            (2, "admin"),
            (1, "start"),
        ]
        assert (await made.asked("POST", "/config/rollback", params={"to": "9"}))[0] == 409
        assert (await made.asked("POST", "/config/rollback", params={"to": "x"}))[0] == 400


async def test_another_port_is_taken_over_and_said_to_need_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        made.write(made.text().replace("api: {port: 0}", "api: {port: 18080}"))
        await made.hears("0 requests affected; needs a restart: listeners.api.port")
        assert (await made.asked("GET", "/config"))[2]["needs_restart"] == ["listeners.api.port"]
        assert await made.ask() == "ok"
        made.write(made.text())
        await made.hears("v3")
        assert (await made.asked("GET", "/config"))[2]["needs_restart"] == []


CANARY = "canary-7d1f"


async def test_no_secret_is_told_by_any_page_line_version_or_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(f"file-{CANARY}-1")
    more = (
        f"tenants:\n  - {{name: plain, key: plain-{CANARY}-1}}\n  - {{name: ref, key: '${{file:key}}'}}\n"
        f"  - {{name: default, key: '${{NONE:-default-{CANARY}}}'}}\nreload: {{state_dir: {tmp_path}/state}}\n"
    )
    async with running(tmp_path, more=more) as made:
        seen = []
        (tmp_path / "key").write_text(f"file-{CANARY}-2")
        await made.hears("tenants.ref.key")
        changed = (made.text() + more).replace(f"plain-{CANARY}-1", f"plain-{CANARY}-2")
        seen.append(dumped(await made.put(changed, params={"dry_run": "1"})))
        seen.append(dumped(await made.put(changed)))
        engine = made.text(0).replace("name: group-0", "name: group-0, api_key: '${file:key}'") + more
        made.write(engine)  # a reference at a new place is refused over HTTP
        await made.hears("api_key")
        seen.append(dumped(await made.put(engine)))
        for place in ("labels: {x: '${file:key}'}", "role: '${file:key}'", "max_concurrency: '${file:key}'"):
            status, told = await made.put(engine.replace("api_key: '${file:key}'", place))
            assert status == 400, told
            seen.append(dumped([status, told]))
        seen.append(dumped(await made.put(engine.replace("key: plain-", "key: [plain-"))))
        seen += [dumped(await made.asked("GET", path)) for path in ("/config", "/config/versions", "/endpoints")]
        async with made.http.get(made.app.admin_url + "/metrics") as page:
            seen.append(await page.text())
        seen += [path.read_text() for path in (tmp_path / "state").iterdir()]
        told = "\n".join([*seen, *made.said, caplog.text])
        assert "tenants.plain.key" in told
        assert "added ${file:key}" in told or "none -> ${file:key}" in told
        assert CANARY not in told


async def test_a_look_at_the_files_brings_nothing_back_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    async with running(tmp_path, poll_s=3600.0) as made:
        await made.put(made.text(0))
        looking = asyncio.create_task(made.app.reloader.changed())
        await asyncio.sleep(0)  # it reads the file, and what comes next waits behind it
        assert (await made.app.reloader.put(made.text(1).encode(), "admin")).result == "applied"
        await looking
        assert made.app.reloader.running.text == made.text(1).encode()


async def test_reloads_under_load_fail_nobody_and_stop_the_loop_for_no_longer_than_50_ms(tmp_path: Path) -> None:
    reloads = int(os.environ.get("PENSTOCK_RELOADS", "60"))
    async with running(tmp_path, groups=4, speed=200) as made:
        texts = [
            made.text(),
            made.text().replace(*LEAST),
            made.text(0, 1, 2),
            made.text(1, 2, 3).replace("waiting_room: {size: 512", "waiting_room: {size: 500"),
            made.text(0, 3).replace("stall: 60s", "stall: 55s"),
        ]
        took: list[float] = []
        worked: list[float] = []
        carry_out = made.app.swap.carry_out

        def timed(plan: Any) -> int:
            stood, busy = Stopwatch(), thread_time()
            affected = carry_out(plan)
            took.append(stood.fair_s)
            worked.append(thread_time() - busy)
            return affected

        made.app.swap.carry_out = timed  # type: ignore[method-assign]
        results = set()
        async with made.load(users=8):
            for number in range(1, reloads + 1):
                results.add((await made.app.reloader.put(texts[number % len(texts)].encode(), "admin")).result)
        assert results == {"applied"}
        print(f"{reloads} reloads, {made.fates}, mean swap {sum(took) / reloads * 1e3:.2f} ms")
        print(f"longest {max(took) * 1e3:.2f} ms, of its own work {max(worked) * 1e3:.2f} ms")
        assert made.fates["ok"] > reloads
        assert sorted(took)[int(0.98 * reloads)] < 0.05 * pace()
        assert max(worked) < 0.05 * pace(), "however busy the machine is with others"
        async with asyncio.timeout(PATIENCE_S):
            while made.app.swap.retiring:
                await asyncio.sleep(0.05)
        table = made.app.gateway.endpoints
        assert len(list(table.all())) == len(made.app.gateway.snapshot.config.pools["chat"].endpoints)
        assert all(live.load.in_flight == 0 for live in table.all())
        assert len(table.prefixes.index.stats().held_tokens) <= 24, "slots are used again"


async def test_engines_of_the_command_line_have_no_file_and_can_be_changed_and_gone_back_to(tmp_path: Path) -> None:
    said: list[str] = []
    begun = from_engines(["http://127.0.0.1:9"], "least_loaded", "127.0.0.1", 0, 0)
    app = App(begun.config, Origin(begun, None, {}, lambda line, bad: said.append(line)))
    assert (await app.reloader.reload("signal")).result == "nothing"
    text = "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\npools: {engines: {endpoints: [{url: 'http://h:9'}]}}"
    outcome = await app.reloader.put(text.encode(), "admin", options=FORCE)
    assert (outcome.result, [change.path for change in outcome.changes]) == (
        "applied",
        ["pools.engines.policy", "pools.engines.endpoints.127.0.0.1:9", "pools.engines.endpoints.h:9"],
    )
    assert (await app.reloader.rollback(1, options=FORCE)).result == "applied"
    assert app.gateway.snapshot.policies["engines"].name == "least_loaded"
    assert [line.split(" (")[0] for line in said] == ["reloaded PUT config v2", "reloaded command line v3"]


async def test_a_pool_may_have_another_name_where_the_engines_name_the_models(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        without = made.text().replace("models:\n  - {name: demo-8b, pool: chat}\n", "")
        assert (await made.put(without))[0] == 200
        assert await made.ask() == "ok"
        status, told = await made.put(without.replace("  chat:\n", "  talk:\n"))
        assert (status, told["result"]) == (200, "applied")
        async with asyncio.timeout(PATIENCE_S):
            while (route := made.app.gateway.snapshot.routes.get("demo-8b")) is None:
                await asyncio.sleep(0.01)
        assert route.pool == "talk"


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"Content-Encoding": "gzip"}, b"version: 1", 400, "the text did not come whole, or is not encoded"),
        ({}, b"#" * (FILE_CAP_BYTES + 2), 413, "the text is larger than 1 MiB"),
    ],
)
async def test_a_text_that_cannot_be_read_is_refused_in_the_shape_of_all_outcomes(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, message: str
) -> None:
    async with running(tmp_path) as made:
        found, _, told = await made.asked("PUT", "/config", data=body, headers=headers)
        assert (found, told["result"], told["problems"], told["changes"]) == (status, "rejected", [], [])
        assert message in told["message"]


async def test_a_policy_that_fails_at_its_trial_pick_is_refused_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with running(tmp_path) as made:
        before = made.app.gateway.snapshot
        monkeypatch.setattr(swap.run, "pick", broken)
        status, told = await made.put(made.text().replace(*LEAST))
        monkeypatch.undo()
        assert (status, told["problems"][0]["line"], told["problems"][0]["col"]) == (400, 10, 13)
        assert "least_loaded failed at a trial pick: ZeroDivisionError()" in told["message"]
        assert made.app.gateway.snapshot is before
        assert await made.ask() == "ok"


async def test_a_secret_that_moves_after_a_rollback_does_not_bring_the_files_text_back(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        secret = tmp_path / "team-key"
        secret.write_text("sk-one\n")
        text = made.text() + "tenants: [{name: a, key: '${file:team-key}'}]\n"
        made.write(text)
        await made.hears("v2 (1 change: tenants.a)")
        made.write(text.replace(*LEAST))
        await made.hears("v3 (1 change")
        assert (await made.asked("POST", "/config/rollback"))[0] == 200
        made.said.clear()
        secret.write_text("sk-two\n")
        await made.hears("v5 (1 change: tenants.a.key)")
        assert made.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
        assert (await made.put("version: 2"))[0] == 400
        made.write(text.replace(*LEAST))
        touched = await made.app.reloader.changed()
        assert touched is None or touched.result == "unchanged"
        assert made.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
        made.write(text.replace(*LEAST) + "# edited\n")
        await made.hears("v6 (1 change: pools.chat.policy)")


async def test_a_file_that_was_rejected_stays_so_while_another_text_is_in_force(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert (await made.put(made.text().replace(*LEAST)))[0] == 200
        made.write("version: 2\n")
        await made.hears("rejected gateway.yaml")
        for _ in range(2):
            await made.app.reloader.changed()
            assert made.app.reloader.last_error is not None
