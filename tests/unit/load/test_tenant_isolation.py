"""Tests of the statistic (area under the ROC curve) that measures the isolation of tenants."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bench.load import tenant_isolation
from bench.load.tenant_isolation import (
    AnswerFacts,
    Area,
    Figures,
    Scores,
    area,
    kept_stderr,
    reorder,
    run_probes,
)
from tests.e2e.processes import GatewayProcess, kill_leaked, run_process


def test_the_area_counts_ordered_pairs_and_half_of_the_ties() -> None:
    assert area([3.0, 4.0], [1.0, 2.0]).auc == 1.0
    assert area([1.0, 2.0], [3.0, 4.0]).auc == 0.0
    assert area([1.0, 3.0], [2.0, 3.0]).auc == (0 + 0 + 1 + 0.5) / 4
    assert area([0.0] * 9, [0.0] * 9) == Area(0.5, 0.5, 0.5)


def test_the_interval_contains_the_true_area_nineteen_times_in_twenty() -> None:
    rng, within = Random(5), 0
    for _ in range(400):
        result = area([rng.gauss(1, 1) for _ in range(60)], [rng.gauss(0, 1) for _ in range(60)])
        # 0.7602 is the AUC of two normal distributions whose means differ by one deviation.
        within += result.low <= 0.7602 <= result.high
    assert within / 400 == pytest.approx(0.95, abs=0.035)


def test_different_distributions_are_distinguishable_and_equal_ones_are_not() -> None:
    rng = Random(6)
    sides = [[rng.gauss(mean, 1) for _ in range(1000)] for mean in (0.3, 0.0, 0.0)]
    assert not area(sides[0], sides[1]).is_a_guess
    assert area(sides[1], sides[2]).is_a_guess


async def test_the_probes_of_the_command_line_are_sent_and_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guess, cached = Area(0.5, 0.49, 0.51), {"on": 0.48, "off": 0.48}
    prefix, by_length = Scores(guess, guess), Scores(guess, Area(0.54, 0.52, 0.56))

    async def measure_mode(
        engines: Sequence[str], options: argparse.Namespace, isolate: str, probes_a_side: int
    ) -> Figures:
        return Figures(isolate, probes_a_side, prefix, by_length, cached[isolate])

    monkeypatch.setattr(tenant_isolation, "measure_mode", measure_mode)
    monkeypatch.setattr(sys, "argv", ["tenant_isolation", "--probes", "600"])
    options = tenant_isolation._options()
    assert await tenant_isolation.run(options, []) == 0
    printed = capsys.readouterr().out
    assert "isolate on: 600 probes per side" in printed
    assert "isolate off: 60 probes per side" in printed
    cached["on"] = 0.46
    assert await tenant_isolation.run(options, []) == 1


class EngineOfLengths:
    """A client of a fake engine that answers sooner to a prompt of a length that it has seen.

    It caches prompts for all tenants if `is_shared`.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._lengths, self._prompts = set[int](), set[str]()
        self._is_shared, self._rng = is_shared, Random(7)

    async def send(self, tenant: str, prompt: str) -> AnswerFacts:
        length = len(prompt)
        is_hit = self._is_shared and prompt in self._prompts
        ttft_s = 0.030 - 0.010 * is_hit - 0.002 * (length in self._lengths)
        self._lengths.add(length)
        self._prompts.add(prompt)
        cached = 128 if is_hit else 0
        return AnswerFacts(ttft_s + self._rng.gauss(0.0, 0.002), cached, len(prompt))


async def test_work_kept_by_length_is_told_apart_from_a_shared_prefix() -> None:
    reordered, unrelated = await run_probes(EngineOfLengths(is_shared=False), 400, 60, Random(1))
    assert reordered.is_a_guess
    assert unrelated.by_usage.is_a_guess
    assert not unrelated.by_ttft.is_a_guess
    reordered, _ = await run_probes(EngineOfLengths(is_shared=True), 40, 60, Random(1))
    assert reordered.by_usage.auc == 1.0
    assert reordered.by_ttft.low > 0.55


def test_a_reordered_prompt_has_the_same_words_and_the_same_first_one() -> None:
    prompt = "a1 the water runs over the dam"
    other = reorder(Random(2), prompt)
    assert other != prompt
    assert other.split()[0] == "a1"
    assert sorted(other.split()) == sorted(prompt.split())


def test_a_gateway_that_ran_too_long_is_named_and_its_stderr_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ready = "API at http://127.0.0.1:1/v1, admin server at http://127.0.0.1:2; press"
    program = f"import sys, time; print({ready!r}, file=sys.stderr, flush=True); time.sleep(600)"
    log = tmp_path / "folder" / "gateway.log"
    with run_process([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        assert process.stderr
        gateway = GatewayProcess(process)
        gateway.read_until_ready(process.stderr)
        with kept_stderr(gateway, log):
            kill_leaked(process, 900.0)
            process.wait(30.0)
    assert log.read_text() == f"{ready}\nthe gateway ended with status -9\n"
    said = capfd.readouterr().err
    assert "killed after 900 s, the limit of a test: " in said
    assert f"the gateway ended with status -9; its stderr is in {log}" in said
