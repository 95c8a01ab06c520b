"""Tests of `penstock replay`: tables, JSON, HTML page, and errors for invalid options."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.cli import main
from planner.replay import preset
from planner.replay.capacity_search import Capacity
from planner.replay.html_report import _shares
from planner.replay.sweep import Comparison, NoCountedRequestError, _capacity
from tests.command_runner import CommandRunner, Result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {
            "timestamp": 3000 * number,
            "input_length": 1500,
            "output_length": 20,
            "hash_ids": [0, number % 3 + 1, 99 + number],
        }
        for number in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(*arguments: object) -> Result:
    return CommandRunner().invoke(main.run, ["replay", *map(str, arguments)])


def test_json_has_every_policy_at_every_rate_and_is_the_same_again(trace: Path) -> None:
    policies = ("--policy", "round_robin,prefix_aware", "--slo", "ttft=150ms,tpot=50ms")
    request = (trace, *policies, "--rate", "1,4", "--capacity", "90", "--json")
    result = call(*request)
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert [(point["policy"], point["load"]) for point in reply["points"]] == [
        *(("round_robin", 1.0), ("round_robin", 4.0), ("prefix_aware", 1.0), ("prefix_aware", 4.0))
    ]
    assert reply["points"][2]["figures"]["hit_ratio"] > reply["points"][0]["figures"]["hit_ratio"]
    assert reply["capacities"]["prefix_aware"][0]["load"] > 1
    again = json.loads(call(*request).stdout)
    for answer in (reply, again):
        for point in answer["points"]:
            del point["figures"]["wall_s"], point["figures"]["pick_us"]
    assert again == reply


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    policies = ("--policy", "least_loaded,prefix_aware", "--slo", "ttft=200ms,tpot=10ms")
    result = call(trace, *policies, "--rate", "1,2", "--capacity", "90,80", "--report", out)
    assert result.exit_code == 0, result.output
    page = _Page()
    page.feed(out.read_text())
    assert (page.open, page.fetched) == ([], [])
    assert "script" not in page.tags
    assert page.tags.count("figure") == 10
    assert page.tags.count("tr") == 5
    assert "prefix_aware" in result.output


def test_faults_classes_admission_and_retries_go_together(trace: Path, tmp_path: Path) -> None:
    classes = tmp_path / "classes.yaml"
    classes.write_text("standard: {ttft: 500ms, tpot: 20ms}\n")
    more = (
        "--faults",
        "lose=0@10s+5s,events=0.5",
        "--admission",
        "cap",
        "--retries",
        2,
        "--patience",
        "20s",
    )
    result = call(
        trace,
        "--policy",
        "least_loaded",
        "--slo",
        classes,
        *more,
        "--from",
        "6s",
        "--to",
        "50s",
        "--json",
    )
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert reply["requests"] == reply["points"][0]["figures"]["offered"] == 15
    assert reply["options"]["standard"]["ttft_s"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "magic"), "unknown routing policy 'magic'"),
        (("--fleet", "F9"), "unknown fleet 'F9'"),
        (("--admission", "magic"), "unknown admission policy 'magic'"),
        (("--rate", "fast"), "list of numbers"),
        (("--rate", "1", "--users", "3"), "exclude each other"),
        (("--slo", "ttft=soon"), "is not a valid time"),
        (("--faults", "flood"), "is not a valid fault"),
        (("--capacity", "100"), "below 100"),
        (("--report", "no/such/directory/page.html"), "cannot be written"),
    ],
)
def test_wrong_usage_exits_2_with_a_message(
    trace: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = call(trace, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_one_request_that_was_served_is_a_replay_that_went_well(trace: Path) -> None:
    trace.write_text(trace.read_text().splitlines()[0])
    assert call(trace, "--policy", "least_loaded").exit_code == 0
    nobody = ",".join(f"lose={group}@0" for group in range(8))
    assert call(trace, "--policy", "least_loaded", "--faults", nobody).exit_code == 1


def test_a_number_of_users_is_replayed_once_however_closely_capacity_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[float] = []

    def replay(contest: Comparison, policy: str, load: float, watch: object) -> float:
        replayed.append(load)
        return load

    monkeypatch.setattr("planner.replay.sweep.one_run", replay)
    attained = {1: 1.0, 2: 0.95, 3: 0.85}
    monkeypatch.setattr(
        "planner.replay.sweep.figures",
        lambda run, from_s: SimpleNamespace(attainment=attained.get(run, 0.0), offered=1),
    )
    capacity = _capacity(
        Comparison(preset("F1"), (), ("any",), loads=(1.0,), by_users=True), "any", 0.9, None
    )
    assert 2 <= capacity.load < 3
    assert len(capacity.tried) > len(replayed) == len(set(replayed))


@pytest.mark.parametrize(
    ("start", "by_users", "truth"),
    [
        (1.0, True, 40),
        (50.0, True, 1000),
        (100.0, True, 1000),
        (100.0, True, 3),
        (3.0, True, 0),
        (100.0, False, 1000),
        (1.0, False, 0.02),
    ],
)
def test_capacity_is_looked_for_far_above_and_below_the_first_load(
    monkeypatch: pytest.MonkeyPatch, start: float, by_users: bool, truth: float
) -> None:
    monkeypatch.setattr("planner.replay.sweep.one_run", lambda contest, policy, load, watch: load)
    monkeypatch.setattr(
        "planner.replay.sweep.figures",
        lambda run, from_s: SimpleNamespace(attainment=1.0 if run <= truth else 0.0, offered=1),
    )
    contest = Comparison(preset("F1"), (), ("any",), loads=(start,), by_users=by_users)
    capacity = _capacity(contest, "any", 0.9, None)
    assert truth * 0.95 <= capacity.load <= (truth + 1 if by_users else truth * 1.05)
    assert not by_users or min(load for load, _ in capacity.tried) > 0.5


def test_no_capacity_is_reported_when_no_request_follows_the_warm_up(trace: Path) -> None:
    request = (trace, "--policy", "least_loaded", "--capacity", "90", "--warmup", "10s")
    result = call(*request)
    assert result.exit_code == 1
    assert (
        "at load 7.59 no request counts after a warm-up of 10 s; use a shorter --warmup"
        in result.output
    )
    assert call(*request[:-1], "1h").exit_code == 1


def test_an_unknown_capacity_keeps_the_results_of_other_policies(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capacity(contest: Comparison, policy: str, target: float, on_progress: object) -> Capacity:
        if policy == "least_loaded":
            raise NoCountedRequestError("at load 7.59 no request is counted", ((1.0, 0.95),))
        return Capacity(2.5, target, ((1.0, 1.0),))

    monkeypatch.setattr("planner.replay.sweep._capacity", capacity)
    page = tmp_path / "out.html"
    request = (trace, "--policy", "least_loaded,round_robin", "--capacity", "90", "--report", page)
    result = call(*request, "--json")
    reply = json.loads(result.stdout)
    assert [point["policy"] for point in reply["points"]] == ["least_loaded", "round_robin"]
    ((missing,), (outcome,)) = (
        reply["capacities"][name] for name in ("least_loaded", "round_robin")
    )
    assert (missing["load"], missing["reason"], missing["tried"]) == (
        None,
        "at load 7.59 no request is counted",
        [[1.0, 0.95]],
    )
    assert outcome["load"] == 2.5
    assert "least_loaded, 90%: at load 7.59 no request is counted." in page.read_text()
    assert "round_robin" in page.read_text()
    assert result.exit_code == 1
    result = call(*request)
    assert re.search(r"least_loaded +│ +– ", result.stdout)
    assert re.search(r"round_robin +│ +2\.5 ", result.stdout)
    assert (
        "least_loaded: no capacity at 90%: at load 7.59 no request is counted; use a shorter --warmup"
        in result.stderr
    )


def test_the_curve_of_a_distribution_ends_at_its_largest_sample() -> None:
    for count in (1, 7, 200, 1001):
        points = _shares([float(index) for index in range(count)], 1.0)
        assert len(points) == min(200, count)
        assert points[-1] == (count - 1.0, 1.0)
        assert points == sorted(set(points))


def test_a_trace_that_cannot_be_read_exits_1_with_file_and_line(trace: Path) -> None:
    trace.write_text(trace.read_text() + "{\n")
    result = call(trace)
    assert (result.exit_code, "trace.jsonl:21: " in result.output) == (1, True)


def test_what_goes_into_a_pipe_fits_80_columns_and_has_every_figure(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = call(trace, "--policy", "round_robin,sglang_cache_aware")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    words = set(re.findall(r"[\w/]+", result.stdout))
    assert {"sglang_cache_aware", "attainment", "imbalance", "fairness", "decision"} <= words
