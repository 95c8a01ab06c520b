"""Tests that docs/when-splitting-pays.md has the numbers that the simulator computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mockgpu.timing.roofline import PROFILES, StepWork
from mockgpu.timing.step_time_grids import roofline_for
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.unit.mockgpu.formulas import kv_transfer_s

PAGE = (Path(__file__).parents[3] / "docs/when-splitting-pays.md").read_text()
ROWS = [
    tuple(float(cell) for cell in row.strip("| ").split("|"))
    for row in re.findall(r"^\| \d.*\|$", PAGE, re.M)
]
MODEL = model_named("llama-3.1-70b-fp8")
ROOFLINE = roofline_for(MODEL, gpu_named("h100"), 4, PROFILES["2026"])
SEQS, CONTEXT = 16, 16 * 2000


def steps_s(tokens: int, chunk_tokens: int, seqs: int = 0, context: int = 0) -> list[float]:
    # Return the seconds of each step that computes a prompt in chunks.
    #
    # `seqs` sequences with `context` tokens in total decode in the same steps.
    chunks = [
        (index, min(chunk_tokens, tokens - index)) for index in range(0, tokens, chunk_tokens)
    ]
    return [
        ROOFLINE.step_s(StepWork(size, size * (index + size / 2), seqs, context))
        for index, size in chunks
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]:.0f} tokens")
def test_the_pages_figures_are_the_rooflines(row: tuple[float, ...]) -> None:
    tokens = int(row[0])
    expected_ms = [1e3 * sum(steps_s(tokens, 8192))]
    expected_ms += [1e3 * max(steps_s(tokens, chunk, SEQS, CONTEXT)) for chunk in (8192, 2048)]
    assert row[1:4] == pytest.approx(expected_ms, abs=0.05)
    assert row[4] == pytest.approx(tokens * MODEL.kv_token_bytes / 1e9, abs=5e-4)
    assert row[5:] == pytest.approx(
        [1e3 * kv_transfer_s(MODEL, tokens, gb * 1e9) for gb in (50, 12.5, 3.125)], abs=0.05
    )


def test_the_page_has_its_rows_and_its_decode_step() -> None:
    assert len(ROWS) == 5
    assert f"takes {1e3 * ROOFLINE.step_s(StepWork(0, 0.0, SEQS, CONTEXT)):.1f} ms" in PAGE
