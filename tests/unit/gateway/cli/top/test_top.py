"""`penstock top`: what it prints once, and what its keys do."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper
from queue import Queue
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import main
from gateway.cli.admin_client import NoAnswerError
from gateway.cli.top.render import COLUMNS, board, spark, volume
from tests.chaos.gateway_fleet import gateway_fleet
from tests.fair_time import PATIENCE_S


def endpoint(name: str, **more: Any) -> dict[str, Any]:
    facts = {"name": name, "url": "http://e:1", "pool": "chat", "role": "both", "engine": "vllm", "layout": "tp4"}
    state = {"state": "up", "cause": None, "since_s": None, "available": True, "silence_s": 0.0, "labels": {}}
    numbers = {"in_flight": 3, "max_concurrency": 24, "waiting": 0, "kv": 0.314, "backlog_tokens": 512, "hit": 0.71}
    paces = {"ttft_p95_s": 0.42, "tpot_p95_s": 0.012, "spark": [0] * 30 + [9] * 30}
    return facts | state | numbers | paces | more


def view(*endpoints: dict[str, Any], why: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    paces = {"p50_s": 0.1, "p95_s": 0.4, "p99_s": 1.25, "budget_s": 5.0}
    totals = {"requests_per_s": 12.34, "tokens_per_s": 900.0, "streams": 7, "waiting": 1, "errors_per_s": 0.0}
    totals |= {"shed_per_s": {"too_slow": 0.5}, "goodput": [{"class": "standard", "ratio": 0.998}]}
    totals |= {"ttft": paces, "tpot": paces, "prefix_hit": 0.613}
    pair = {"prefill": "p-0", "decode": "d-0", "per_s": 1.5, "failed": 2, "p95_s": 0.09, "kv_bytes_per_s": 1.25e9}
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
    console.print(board(frame))
    return console.export_text()


def test_one_look_tells_totals_fleet_flow_and_why() -> None:
    said = printed(view(endpoint("d-0"), OUT, why=(WHY,)))
    assert "penstock v4   1 of 2 serve   12.3 req/s   900 tok/s   7 in flight   1 waiting   0.5 refused/s" in said
    assert "TTFT p50 100ms  p95 400ms  p99 1.25s of 5.00s" in said
    assert "prefix hits 61.3%" in said
    assert "standard 99.8% kept" in said
    assert "DEAD 14s engine_dead" in said
    assert "1.5/s 1.25 GB/s p95 90ms 2 failed" in said
    assert "KV flow (3 under way, 31 MB/s by shm)" in said
    assert "! d-1 is out for 14 s." in said


def test_one_request_is_shown_as_one_and_not_as_percentiles() -> None:
    frame = view()
    frame["totals"]["ttft"] = frame["totals"]["ttft"] | {"p95_s": 0.1, "p99_s": 0.1, "count": 1}
    assert "TTFT 100ms (one request) of 5.00s" in printed(frame)


def test_a_quiet_gateway_says_so() -> None:
    frame = view()
    frame["flow"]["pairs"] = []
    assert "nothing to explain: all is well" in printed(frame)


def test_bytes_are_told_with_three_digits() -> None:
    assert [volume(count) for count in (0.0, 512.4, 999.6, 31e6, 12.345e9)] == [
        *("0 B", "512 B", "1 kB", "31 MB", "12.35 GB")
    ]


def test_a_sparkline_shows_the_largest_of_each_part() -> None:
    assert spark([0] * 40 + [0, 0, 4] * 6 + [0, 0]) == "▁" * 14 + "▇" * 6
    assert spark([]) == ""


async def test_once_and_json_ask_a_running_gateway_and_need_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_fleet(2) as home:
        for words, wanted in (((), "2 of 2 serve"), (("--once",), "2 of 2 serve"), (("--json",), '"endpoints"')):
            asked = ("top", *words, "--admin", home.app.admin_url)
            done = await asyncio.to_thread(CliRunner().invoke, main.app, asked)
            assert (done.exit_code, wanted in done.output) == (0, True), done.output
        assert len(json.loads(done.output)["endpoints"]) == 2
        letters = TextIOWrapper(BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", letters)
        monkeypatch.setattr("sys.argv", ["penstock", "top", "--once", "--admin", home.app.admin_url])
        with pytest.raises(SystemExit, match="0"):
            await asyncio.to_thread(main.main)
        monkeypatch.undo()
        letters.seek(0)
        assert "2 of 2 serve" in letters.read()
    gone = await asyncio.to_thread(CliRunner().invoke, main.app, ["top", "--once", "--admin", home.app.admin_url])
    assert (gone.exit_code, "no gateway answers" in gone.output) == (1, True)


class Told:
    """A gateway that streams what a test puts and remembers what it was asked."""

    def __init__(self) -> None:
        self.frames: Queue[dict[str, Any] | None] = Queue()
        self.asked: list[tuple[str, str]] = []
        self.refuses = False

    def stream(self, path: str) -> Iterator[Any]:
        assert path == "/live/stream"
        while (frame := self.frames.get()) is not None:
            yield frame

    def try_ask(self, method: str, path: str) -> Any:
        self.asked.append((method, path))
        if self.refuses:
            raise NoAnswerError("only with the admin key")
        return {"message": "no such request"} if method == "GET" else {"drained": path.endswith("/drain")}


async def test_what_the_gateway_refuses_is_told_on_the_screen_and_ends_nothing() -> None:
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    from textual.widgets import DataTable

    from gateway.cli.top.tui import Top

    source = Told()
    source.refuses = True
    screen = Top(source)
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
            assert [each.message for each in screen._notifications] == ["only with the admin key"]
        source.frames.put(None)
    assert source.asked == [("POST", "/endpoints/d-0/drain"), ("GET", "/explain/last")]


async def test_one_who_leaves_and_one_who_came_with_its_name_have_a_row_each() -> None:
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    from textual.widgets import DataTable

    from gateway.cli.top.tui import Top

    source = Told()
    screen = Top(source)
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

    from gateway.cli.top.tui import Confirm, Top
    from gateway.cli.top.tui import Told as Page

    source = Told()
    frame = view(endpoint("d-0"), OUT, why=(WHY,))
    screen = Top(source)
    async with screen.run_test(size=(150, 40)) as pilot:

        async def until(true: Any) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    await pilot.pause(0.01)

        table = screen.query_one(DataTable)
        source.frames.put(copy.deepcopy(frame))
        await until(lambda: table.row_count == 2)
        await pilot.press("down", "d", "n", "d", "escape")
        await until(lambda: not isinstance(screen.screen, Confirm))
        assert source.asked == []
        await pilot.press("d")
        await until(lambda: isinstance(screen.screen, Confirm))
        await pilot.press("y")
        await until(lambda: source.asked == [("POST", "/endpoints/d-1/drain")])
        frame["endpoints"][1]["state"] = "drained"
        source.frames.put(copy.deepcopy(frame))
        await until(lambda: str(table.get_cell_at(Coordinate(1, COLUMNS.index("state")))) == "drained")
        assert table.cursor_row == 1
        await pilot.press("d")
        await until(lambda: source.asked[-1] == ("POST", "/endpoints/d-1/undrain"))

        await pilot.press("enter")
        await until(lambda: isinstance(screen.screen, Page))
        assert source.asked[-1] == ("GET", "/explain/last")
        await pilot.press("escape")
        await until(lambda: not isinstance(screen.screen, Page))

        await pilot.press("slash", *"dr")
        await until(lambda: table.row_count == 1)
        await pilot.press("enter", "escape")
        await until(lambda: table.row_count == 2)

        await pilot.press("p")
        frame["config"]["version"] = 99
        source.frames.put(copy.deepcopy(frame))
        await until(source.frames.empty)
        await pilot.pause()
        assert screen.shown["config"]["version"] == 4
        await pilot.press("p")
        frame["config"]["version"] = 100
        source.frames.put(copy.deepcopy(frame))
        source.frames.put(None)
        await until(lambda: screen.shown["config"]["version"] == 100)
        await pilot.press("q")
