"""Tests that the mock engine's step durations are positive, and grow with the work in the step.

The tests cover any GPU, model, tensor-parallel size and software profile.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from mockgpu.timing.roofline import PROFILES, Roofline, StepWork, profile_named
from mockgpu.timing.step_time_grids import load_grids, roofline_for, whole_prompt
from policies.sizing.gpus import GPUS, gpu_named
from policies.sizing.model_shapes import MODELS, model_named

GRIDS = load_grids()
SHAPES = [
    (model, gpu, tp, profile)
    for model, gpu, tp, profile in product(
        ("demo-8b", "llama-3.1-70b", "qwen3-32b", "deepseek-v3"), GPUS, (1, 4, 8), PROFILES
    )
]


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def line(request: pytest.FixtureRequest) -> Roofline:
    model, gpu, tp, profile = request.param
    return roofline_for(model_named(model), gpu_named(gpu), tp, profile_named(profile), GRIDS)


def test_more_prompt_takes_longer(line: Roofline) -> None:
    times = [line.step_s(whole_prompt(n)) for n in (256, 512, 1024, 3000, 8192, 50_000, 200_000)]
    assert all(0 < a < b for a, b in pairwise(times))


def test_more_context_and_many_more_sequences_take_longer(line: Roofline) -> None:
    contexts = [line.step_s(StepWork(0, 0.0, 32, 32 * c)) for c in (1024, 4096, 8192, 60_000)]
    batches = [line.step_s(StepWork(0, 0.0, b, b * 4096)) for b in (1, 16, 64, 128, 512)]
    assert all(0 < a < b for times in (contexts, batches) for a, b in pairwise(times))


def test_a_step_with_both_kinds_costs_more_than_either_and_less_than_both(line: Roofline) -> None:
    for tokens, seqs in product((128, 512, 2048), (1, 16, 128)):
        prompt, decode = whole_prompt(tokens), StepWork(0, 0.0, seqs, seqs * 2048)
        mixed = line.step_s(StepWork(tokens, prompt.attention_area, seqs, seqs * 2048))
        alone = line.step_s(prompt), line.step_s(decode)
        assert 0.8 * max(alone) < mixed < 1.1 * sum(alone)


def test_a_cached_prefix_saves_time_but_is_still_attended_to(line: Roofline) -> None:
    whole, start = 8192, 6144
    rest = whole - start
    late = line.step_s(StepWork(rest, rest * (start + rest / 2)))
    assert line.step_s(whole_prompt(rest)) < late < line.step_s(whole_prompt(whole))


def test_every_name_finds_its_model_gpu_and_profile_and_others_are_refused() -> None:
    assert all(model_named(name.upper()) is model for name, model in MODELS.items())
    assert all(gpu_named(name.upper()) is gpu for name, gpu in GPUS.items())
    for look in (model_named, gpu_named, profile_named):
        with pytest.raises(ValueError, match="known "):
            look("abacus")
