"""Tests of the command `penstock top`: its text output, and its keys."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper
from queue import Queue
from typing import Any

import pytest
from rich.console import Console

from gateway.cli import main
from gateway.cli.admin_client import AdminClient, AdminServerError
from gateway.cli.top import command, noninteractive
from gateway.cli.top.render import COLUMNS, bytes_text, render_view, sparkline
from tests.chaos.gateway_fleet import gateway_fleet
from tests.command_runner import CommandRunner
from tests.duration_limits import PATIENCE_S
from tests.replacement import stand_in


def endpoint(name: str, **more: Any) -> dict[str, Any]:
    facts = {
        "name": name,
        "url": "http://e:1",
        "pool": "chat",
        "role": "both",
        "engine": "vllm",
        "layout": "tp4",
    }
    state = {
        "state": "up",
        "cause": None,
        "since_s": None,
        "available": True,
        "silence_s": 0.0,
        "labels": {},
    }
    numbers = {
        "in_flight": 3,
        "max_concurrency": 24,
        "waiting": 0,
        "kv": 0.314,
        "backlog_tokens": 512,
        "hit": 0.71,
    }
    paces = {"ttft_p95_s": 0.42, "tpot_p95_s": 0.012, "spark": [0] * 30 + [9] * 30}
    return facts | state | numbers | paces | more


def view(*endpoints: dict[str, Any], why: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    paces = {"p50_s": 0.1, "p95_s": 0.4, "p99_s": 1.25, "budget_s": 5.0}
    totals = {
        "requests_per_s": 12.34,
        "tokens_per_s": 900.0,
        "streams": 7,
        "waiting": 1,
        "errors_per_s": 0.0,
    }
    totals |= {"shed_per_s": {"too_slow": 0.5}, "goodput": [{"class": "standard", "ratio": 0.998}]}
    totals |= {"ttft": paces, "tpot": paces, "prefix_hit": 0.613}
    pair = {
        "prefill": "p-0",
        "decode": "d-0",
        "per_s": 1.5,
        "failed": 2,
        "p95_s": 0.09,
        "kv_bytes_per_s": 1.25e9,
    }
    return {
        "config": {"version": 4},
        "totals": totals,
        "endpoints": list(endpoints),
        "flow": {"pairs": [pair], "under_way": 3, "kv_bytes_per_s": {"shm": 31e6}},
        "why": list(why),
    }


OUT = endpoint("d-1", state="dead", cause="engine_dead", since_s=14.2, available=False)
WHY = {"grade": "bad", "text": "d-1 is out for 14 s.", "endpoint": "d-1"}


def printed(frame: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=StringIO())
    console.print(render_view(frame))
    return console.export_text()


def test_the_view_has_totals_fleet_flow_and_diagnosis() -> None:
    output = printed(view(endpoint("d-0"), OUT, why=(WHY,)))
    assert "penstock v4   1 of 2 up   12.3 req/s   900 tok/s   7 in flight" in output
    assert "1 waiting   0.5 rejected/s" in output
    assert "TTFT p50 100ms  p95 400ms  p99 1.25s of 5.00s" in output
    assert "prefix hits 61.3%" in output
    assert "standard SLO met 99.8%" in output
    assert "DEAD 14s engine_dead" in output
    assert "1.5/s 1.25 GB/s p95 90ms 2 failed" in output
    assert "KV flow (3 in progress, 31 MB/s by shm)" in output
    assert "! d-1 is out for 14 s." in output


def test_one_request_is_shown_without_percentiles() -> None:
    frame = view()
    frame["totals"]["ttft"] = frame["totals"]["ttft"] | {"p95_s": 0.1, "p99_s": 0.1, "count": 1}
    assert "TTFT 100ms (one request) of 5.00s" in printed(frame)


def test_an_idle_gateway_has_no_problems() -> None:
    frame = view()
    frame["flow"]["pairs"] = []
    assert "no problems" in printed(frame)


def test_bytes_have_three_digits() -> None:
    assert [bytes_text(count) for count in (0.0, 512.4, 999.6, 31e6, 12.345e9)] == [
        *("0 B", "512 B", "1 kB", "31 MB", "12.35 GB")
    ]


def test_a_sparkline_shows_the_largest_value_of_each_interval() -> None:
    assert sparkline([0] * 40 + [0, 0, 4] * 6 + [0, 0]) == "▁" * 14 + "▇" * 6
    assert sparkline([]) == ""


async def test_once_and_json_need_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_fleet(2) as fleet:
        for words, wanted in (
            ((), "2 of 2 up"),
            (("--once",), "2 of 2 up"),
            (("--json",), '"endpoints"'),
        ):
            asked = ("top", *words, "--admin", fleet.app.admin_url)
            done = await asyncio.to_thread(CommandRunner().invoke, main.run, asked)
            assert (done.exit_code, wanted in done.output) == (0, True), done.output
        assert len(json.loads(done.output)["endpoints"]) == 2
        letters = TextIOWrapper(BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", letters)
        monkeypatch.setattr(
            "sys.argv", ["penstock", "top", "--once", "--admin", fleet.app.admin_url]
        )
        await asyncio.to_thread(main.main)
        monkeypatch.undo()
        letters.seek(0)
        assert "2 of 2 up" in letters.read()
    gone = await asyncio.to_thread(
        CommandRunner().invoke, main.run, ["top", "--once", "--admin", fleet.app.admin_url]
    )
    assert (gone.exit_code, "cannot reach a gateway" in gone.output) == (1, True)


def test_without_its_optional_library_top_shows_how_to_get_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = StringIO()
    console = Console(file=screen, width=200, force_terminal=True)
    monkeypatch.setattr(noninteractive, "_console", lambda: console)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    source = FakeSource()
    source.frames.put(view(endpoint("d-0")))
    source.frames.put(None)
    command._show(stand_in(AdminClient, source), once=False)
    assert "d-0" in screen.getvalue()
    assert f"{sys.executable} -m pip install textual" in screen.getvalue()


class FakeSource:
    def __init__(self) -> None:
        self.frames: Queue[dict[str, Any] | None] = Queue()
        self.asked: list[tuple[str, str]] = []
        self.refuses = False

    def stream(self, path: str) -> Iterator[Any]:
        assert path == "/live/stream"
        while (frame := self.frames.get()) is not None:
            yield frame

    def try_request(self, method: str, path: str) -> Any:
        self.asked.append((method, path))
        if self.refuses:
            raise AdminServerError("the admin server accepts changes only with the admin key")
        return (
            {"message": "no such request"}
            if method == "GET"
            else {"drained": path.endswith("/drain")}
        )


async def test_a_refused_request_shows_a_message_and_the_view_continues() -> None:
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    from textual.widgets import DataTable

    from gateway.cli.top.tui import TopApp

    source = FakeSource()
    source.refuses = True
    screen = TopApp(source)
    async with screen.run_test(size=(150, 40), notifications=True) as pilot:
        source.frames.put(view(endpoint("d-0")))
        for key in ("d", "enter"):
            async with asyncio.timeout(PATIENCE_S):
                while screen.query_one(DataTable).row_count != 1:
                    await pilot.pause(0.01)
                screen.clear_notifications()
                await pilot.press(key, *(("y",) if key == "d" else ()))
                while not len(screen._notifications):
                    await pilot.pause(0.01)
            assert [notification.message for notification in screen._notifications] == [
                "the admin server accepts changes only with the admin key"
            ]
        source.frames.put(None)
    assert source.asked == [("POST", "/endpoints/d-0/drain"), ("GET", "/explain/last")]


async def test_a_removed_and_a_new_endpoint_of_the_same_name_have_a_row_each() -> None:
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    from textual.widgets import DataTable

    from gateway.cli.top.tui import TopApp

    source = FakeSource()
    screen = TopApp(source)
    async with screen.run_test(size=(150, 40)) as pilot:
        source.frames.put(view(endpoint("d-0", state="leaving"), endpoint("d-0", url="http://e:2")))
        source.frames.put(None)
        async with asyncio.timeout(PATIENCE_S):
            while screen.query_one(DataTable).row_count != 2:
                await pilot.pause(0.01)


async def test_keys_drain_explain_filter_and_pause() -> None:
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    from textual.coordinate import Coordinate
    from textual.widgets import DataTable

    from gateway.cli.top.tui import ConfirmDialog, DetailPage, TopApp

    source = FakeSource()
    frame = view(endpoint("d-0"), OUT, why=(WHY,))
    screen = TopApp(source)
    async with screen.run_test(size=(150, 40)) as pilot:

        async def until(true: Any) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    await pilot.pause(0.01)

        table = screen.query_one(DataTable)
        source.frames.put(copy.deepcopy(frame))
        await until(lambda: table.row_count == 2)
        await pilot.press("down", "d", "n", "d", "escape")
        await until(lambda: not isinstance(screen.screen, ConfirmDialog))
        assert source.asked == []
        await pilot.press("d")
        await until(lambda: isinstance(screen.screen, ConfirmDialog))
        await pilot.press("y")
        await until(lambda: source.asked == [("POST", "/endpoints/d-1/drain")])
        frame["endpoints"][1]["state"] = "drained"
        source.frames.put(copy.deepcopy(frame))
        await until(
            lambda: str(table.get_cell_at(Coordinate(1, COLUMNS.index("state")))) == "drained"
        )
        assert table.cursor_row == 1
        await pilot.press("d")
        await until(lambda: source.asked[-1] == ("POST", "/endpoints/d-1/undrain"))

        await pilot.press("enter")
        await until(lambda: isinstance(screen.screen, DetailPage))
        assert source.asked[-1] == ("GET", "/explain/last")
        await pilot.press("escape")
        await until(lambda: not isinstance(screen.screen, DetailPage))

        await pilot.press("slash", *"dr")
        await until(lambda: table.row_count == 1)
        await pilot.press("enter", "escape")
        await until(lambda: table.row_count == 2)

        await pilot.press("p")
        frame["config"]["version"] = 99
        source.frames.put(copy.deepcopy(frame))
        await until(source.frames.empty)
        await pilot.pause()
        assert screen.current_view["config"]["version"] == 4
        await pilot.press("p")
        frame["config"]["version"] = 100
        source.frames.put(copy.deepcopy(frame))
        source.frames.put(None)
        await until(lambda: screen.current_view["config"]["version"] == 100)
        await pilot.press("q")
