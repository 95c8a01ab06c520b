"""Tests of the HTML page of `penstock size --report`: one file, with computed values only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.planner.size.test_cli import HARBOR, plain, run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "size.html"
    result = run(*HARBOR, "--gpus", "16", "--report", str(file))
    assert result.exit_code == 0, result.output
    return file.read_text()


def test_the_page_loads_nothing_and_its_script_has_no_arithmetic(page: str) -> None:
    assert not re.findall(r"(?:src|href)=|@import|url\(|fetch\(", page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert not re.findall(r"[-+*/%]\s*\d|Math\.|\d\s*[-+*/]", script)


def test_the_page_shows_the_numbers_of_the_command(page: str) -> None:
    arguments = (*HARBOR, "--gpus", "16", "--ladder", "16", "--front")
    members = plain(*arguments)
    block = page.split("<p>Batch 16</p>")[1].split("</table>")[0]
    for step in members["ladder"]:
        assert f"<td>{step['tp']}</td>" in block
        assert f"<td>{step['tokens_s_gpu']:.0f}</td>" in block
    assert page.count("<circle") == len(members["front"])
    assert page.count('class="best"') == sum(point["is_best"] for point in members["front"])
    assert page.count('class="no"') == sum(bool(point["reason"]) for point in members["front"])


def test_the_headline_flips_with_the_promise(page: str) -> None:
    headlines = re.findall(r'class="headline"[^>]*>(.*?)</p>', page)
    assert len(headlines) == 10
    assert "no layout keeps 5.0 ms" in headlines[0]
    assert "TP 4 at batch 16 for the 40.0 ms promise" in headlines[5]
    assert headlines[-1].endswith("the model needs 2 GPUs to fit")
    assert 'value="5" data-group="promise"' in page, "the slider begins at the plan's promise"


def test_a_token_has_a_lane_for_each_gpu_at_the_speed_of_its_part(page: str) -> None:
    blocks = page.split('data-of="token"')[1:]
    assert [block.count('class="lane"') for block in blocks] == [1, 2, 4, 8, 16]
    durations = [float(re.findall(r"duration:([\d.]+)s", block)[0]) for block in blocks]
    assert durations[0] / durations[3] == pytest.approx(8.0, rel=0.01)


def test_a_cell_has_the_requests_per_second_of_its_shape_and_replicas(page: str) -> None:
    points = plain(*HARBOR, "--gpus", "16", "--front")["front"]
    block = page.split("<p>16 at a time per replica</p>")[1].split("</table>")[0]
    (row,) = re.findall(r"<tr><td>[^<]*-FP8, TP 4</td>(.*?)</tr>", block, re.S)
    cells = re.findall(r'<td class="(\w*)" data-text="([^"]*)">([\d.]+)</td>', row)
    (point,) = (
        each
        for each in points
        if (each["tp"], each["pp"], each["batch"]) == (4, 1, 16) and "FP8" in each["model"]
    )
    rates = [float(rate) for _, _, rate in cells]
    assert rates == pytest.approx(
        [point["requests_s"] / 4 * count for count in (1, 2, 4, 8, 16)], abs=0.006
    )
    assert [kind for kind, _, _ in cells] == ["", "", "good", "off", "off"]
    assert cells[2][1].startswith("4 x TP 4 x PP 1, batch 16")
    assert cells[3][1].endswith("Not possible: needs 32 GPUs of 16")
    assert "no request of" in block, "bf16 at TP 2 holds no request"


def test_a_rate_and_a_promise_have_the_least_fleet_of_each_shape(page: str) -> None:
    slow = _load_block(page, "2 requests/s, 40.0 ms per token")
    rows = re.findall(r'<tr class="(\w*)"><td>([^<]*)</td>(.*?)</tr>', slow)
    good = [(shape, _cells(rest)) for kind, shape, rest in rows if kind == "good"]
    assert [shape.split("-")[-1] for shape, _ in good] == ["FP8, TP 2", "FP8, TP 4"]
    # Four replicas (TP 4, batch 16) serve 8.7 requests per second, so one serves 2.2.
    assert [cells[:4] for _, cells in good] == [
        ["8", "2", "4", "$10.00"],
        ["16", "1", "4", "$10.00"],
    ]
    fast = _load_block(page, "2 requests/s, 5.0 ms per token")
    assert "no batch keeps 5.0 ms per token and 1,200 ms to the first token" in fast
    many = _load_block(page, "10 requests/s, 40.0 ms per token")
    (own,) = (
        _cells(rest)
        for shape, rest in re.findall(r'<tr class="grey"><td>([^<]*)</td>(.*?)</tr>', many)
        if shape.endswith("FP8, TP 4")
    )
    assert own[:3] == ["16", "5", "20"]
    assert own[-1] == "needs 20 GPUs of 16"


def test_the_sliders_begin_at_the_rate_and_the_promise_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "size.html"
    assert run(*HARBOR[:-4], "--tpot", "38ms", "--rate", "4", "--report", str(file)).exit_code == 0
    page = file.read_text()
    at = {group: number for number, group in re.findall(r'value="(\d+)" data-group="(\w+)"', page)}
    assert f'data-of="promise" data-at="{at["promise"]}">38.0 ms: ' in page
    rows = page.split(f'data-of="rate" data-at="{at["rate"]}">')[1]
    shown = rows.split(f'data-of="latency" data-at="{at["latency"]}">')[1]
    assert shown.startswith("<p>4 requests/s, 38.0 ms per token</p>")


def test_the_axes_of_the_layouts_have_round_numbers(page: str) -> None:
    labels = re.findall(r'<text [^>]*text-anchor="(?:middle|end)">([^<]*)</text>', page)
    assert {"10.0 ms", "20.0 ms", "50.0 ms", "100 ms", "1", "2", "5", "10"} <= set(labels)


def _load_block(page: str, title: str) -> str:
    return page.split(f"<p>{title}</p>")[1].split("</table>")[0]


def _cells(row: str) -> list[str]:
    return re.findall(r"<td>(.*?)</td>", row)


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    result = run(*HARBOR, "--report", str(tmp_path / "missing" / "page.html"))
    assert result.exit_code == 2
    assert "cannot be written" in " ".join(result.output.split())
