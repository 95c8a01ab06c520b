"""Tests of the page of `penstock size --report`: one file, rendered values, and no formula in its
script.
"""

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


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    result = run(*HARBOR, "--report", str(tmp_path / "missing" / "page.html"))
    assert result.exit_code == 2
    assert "cannot be written" in " ".join(result.output.split())
