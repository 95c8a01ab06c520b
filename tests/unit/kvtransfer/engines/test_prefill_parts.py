"""Tests of when, and under which names, parts of a prompt's KV are offered early."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtransfer.engines.vllm.prefill_parts import (
    MAX_PARTS,
    PrefillParts,
    PromptPart,
    StepOffers,
    split_prompt,
)
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk

KEY, DIGEST = b"k" * 32, b"d" * 16


def parts(tokens: int, part_tokens: int = 8, block_tokens: int = 4) -> list[PromptPart]:
    return split_prompt(KEY, "t1", DIGEST, tokens, part_tokens, block_tokens)


@pytest.mark.parametrize(
    ("tokens", "part_tokens", "ends"),
    [
        (1, 8, [1]),
        (8, 8, [8]),
        (9, 8, [8, 9]),
        (31, 8, [8, 16, 24, 31]),
        (11, 5, [8, 11]),
        (640, 8, [80 * i for i in range(1, 9)]),
    ],
)
def test_parts_begin_with_blocks_and_cover_the_prompt(
    tokens: int, part_tokens: int, ends: list[int]
) -> None:
    found = parts(tokens, part_tokens)
    assert [part.end for part in found] == ends
    assert [part.begin for part in found] == [0, *ends[:-1]]
    assert len(found) <= MAX_PARTS


def test_every_part_of_every_prompt_and_transfer_has_a_name_of_its_own() -> None:
    names = {
        part.name
        for key in (KEY, b"x" * 32)
        for transfer in ("t1", "t2")
        for digest in (DIGEST, b"e" * 16)
        for part in split_prompt(key, transfer, digest, 32, 8, 4)
    }
    assert len(names) == 2 * 2 * 2 * 4


class Prompt:
    # A request of 20 tokens in blocks of 4, offered in parts of 8; its blocks are 10, 11, ...

    def __init__(self, *, layerwise: bool = True) -> None:
        self.parts = PrefillParts(4, 30.0, layerwise=layerwise)
        self.parts.begin("r", parts(20))
        self.blocks: list[int] = []

    def step(self, computed: int, tokens: int) -> StepOffers:
        self.blocks = list(range(10, 10 + -(-(computed + tokens) // 4)))
        return self.parts.on_step([PromptChunk("r", computed, tokens)], lambda _: self.blocks)

    def end(self, *, is_whole: bool = True) -> StepOffers:
        step = self.parts.end("r", self.blocks, is_whole=is_whole)
        assert step is not None
        return step


def offered(step: StepOffers) -> list[tuple[int, int, bool]]:
    # Return (tokens, number of blocks, whether computed before) of each offer.
    return [(offer.tokens, len(offer.blocks), offer.is_computed) for offer in step.offers]


def test_a_part_is_offered_in_the_step_that_computes_its_last_token() -> None:
    prompt = Prompt()
    assert offered(prompt.step(0, 7)) == []
    assert offered(prompt.step(7, 3)) == [(8, 2, False)]
    assert offered(prompt.step(10, 10)) == [(16, 4, False), (20, 5, False)]
    end = prompt.end()
    assert (end.is_kept, offered(end), end.revokes, end.declines) == (True, [], [], [])


def test_parts_that_were_cached_are_offered_as_computed() -> None:
    prompt = Prompt()
    assert offered(prompt.step(12, 8)) == [(8, 2, True), (16, 4, False), (20, 5, False)]


def test_without_layers_all_parts_are_offered_at_the_end() -> None:
    prompt = Prompt(layerwise=False)
    assert offered(prompt.step(0, 20)) == []
    assert offered(prompt.end()) == [(8, 2, True), (16, 4, True), (20, 5, True)]


def _lose(prompt: Prompt, blocks: Sequence[int]) -> StepOffers:
    return prompt.parts.on_step([], lambda _: blocks)


@pytest.mark.parametrize("blocks", [[], [10], [10, 99]])
def test_a_preempted_prompt_ends_its_offers_before_the_step(blocks: list[int]) -> None:
    prompt = Prompt()
    prompt.step(0, 8)
    lost = _lose(prompt, blocks)
    names = [part.name for part in parts(20)]
    assert (lost.offers, lost.revokes, lost.declines) == ([], ["r"], names[1:])
    assert offered(prompt.step(0, 20)) == []
    end = prompt.end()
    assert (end.is_kept, end.offers, end.revokes, end.declines) == (False, [], [], [])


def test_a_prompt_that_waits_for_its_next_step_keeps_its_offers() -> None:
    prompt = Prompt()
    prompt.step(0, 8)
    waiting = _lose(prompt, [10, 11])
    assert (waiting.offers, waiting.revokes) == ([], [])
    assert offered(prompt.step(8, 8)) == [(16, 4, False)]


@pytest.mark.parametrize(
    ("steps", "is_kept", "declined"),
    [(lambda p: None, False, 3), (lambda p: p.step(0, 8), True, 2), (lambda p: p.step(0, 20), True, 0)],
)  # fmt: skip
def test_an_aborted_prompt_ends_its_offers_and_declines_the_others(
    steps: Callable[[Prompt], object], is_kept: bool, declined: int
) -> None:
    prompt = Prompt()
    steps(prompt)
    end = prompt.end(is_whole=False)
    assert (end.is_kept, end.offers) == (is_kept, [])
    assert (end.revokes, len(end.declines)) == (["r"] if is_kept else [], declined)
    assert prompt.parts.end("r", [], is_whole=False) is None
