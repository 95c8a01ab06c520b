"""Tests of our KV connector with every kind of KV cache that vLLM's CPU build has.

Each kind has a model or a cache type of its own. One engine has two ranks, each a process, and the
other engine has one. Handoffs go in both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.real.engine_requests import (
    BFLOAT16_TOLERANCE,
    LOGPROB_TOLERANCE,
    Answer,
    ask,
    body,
    differences,
    differences_until_a_tie,
    prompt,
)
from tests.real.engines import Engine
from tests.real.handoff_by_hand import card_of, push
from tests.real.test_connector import started

REQUESTS = 6
SMALL_STEPS = ("--max-num-batched-tokens", "512")
# The backend of any CPU. It has blocks of 16 tokens, and computes a prompt in one step. vLLM's
# kernel of rotary embeddings for CPUs takes the stride between two heads for the one between two
# tokens, so that MLA's answers depend on the number of heads per rank and of tokens per step.
# Without the kernel, PyTorch computes the embeddings, and answers equal those of transformers.
CPU_MLA = (
    *("--attention-backend", "CPU_MLA", "--max-model-len", "3072"),
    *("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
)


class CacheKind(NamedTuple):
    """A kind of KV cache to test: the model, vLLM's options, and the number of KV heads.

    `tolerance` is for log probabilities. If it is that of bfloat16, answers may part at a tie.
    """

    name: str
    model: str
    heads: int
    options: Sequence[str] = ()
    prefill_options: Sequence[str] = SMALL_STEPS
    tolerance: float = LOGPROB_TOLERANCE

    def differences(self, one: Answer, other: Answer) -> list[str]:
        if self.tolerance == LOGPROB_TOLERANCE:
            return differences(one, other)
        return differences_until_a_tie(one, other, self.tolerance)


KINDS = (
    CacheKind("GQA", "model", 2),
    CacheKind(
        "fp8",
        "model",
        2,
        ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8"),
        tolerance=BFLOAT16_TOLERANCE,
    ),
    CacheKind("repeated head", "one-head", 1),
    CacheKind("MLA", "latent", 1, CPU_MLA, ()),
    CacheKind("sliding window", "window", 2),
    CacheKind("windows and full attention", "windows-and-full", 2),
)


def dumped(folder: Path, side: str, heads: int) -> dict[str, NDArray[np.uint8]]:
    # Return dumped KV by name of the offer, with the heads of the model in order. Ranks that have
    # the same head must have the same bytes.
    ranks: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"{side}-*.npy")):
        ranks.setdefault(path.stem.split("-", 1)[1].rpartition("-")[0], []).append(path)
    result = {}
    for name, paths in ranks.items():
        pages = np.concatenate(list(map(np.load, paths)), 2)
        repeats = pages.shape[2] // heads
        result[name] = pages[:, :, ::repeats]
        for other in range(1, repeats):
            assert np.array_equal(pages[:, :, other::repeats], result[name]), (side, name)
    return result


async def handoffs(p: Engine, d: Engine, first: int, kind: CacheKind) -> None:
    # Send split requests, and compare their answers with those of each engine alone. Aggregated
    # answers of one rank and of two may differ; either counts. A prompt whose second half
    # is another shows that the comparison finds wrong KV.
    card = await card_of(p, d)
    for seed in range(first, first + REQUESTS):
        words = 150 + 150 * (seed % 100)
        text = prompt(words, seed=seed)
        asked = body(text, max_tokens=8, top_logprobs=5)
        wholes = [await ask(e.url, asked | {"cache_salt": f"w{seed}"}) for e in (p, d)]
        answer = await push(p, d, asked, f"t{seed}", card)
        assert (answer.status, answer.error) == (200, "")
        found = [kind.differences(answer, whole) for whole in wholes]
        assert [] in found, (seed, found)
        changed = f"{text[: len(text) // 2]} {prompt(words // 2, seed=seed + 100)}"
        other = body(changed, max_tokens=8, top_logprobs=5)
        wrong = [kind.differences(await ask(e.url, other), answer) for e in (p, d)]
        assert [] not in wrong, seed
    for engine in (p, d):
        await engine.idle_within(40.0)


def has_avx512() -> bool:
    return "avx512" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_kv_of_every_kind_arrives_between_two_ranks_and_one(
    kind: CacheKind, tmp_path: Path
) -> None:
    if kind.name == "fp8" and not has_avx512():
        pytest.skip("vLLM's fp8 cache on CPUs needs AVX-512, which this machine lacks")
    folder = tmp_path / "dump"
    options = (*kind.options, *kind.prefill_options)
    with started(tmp_path, 2, options, kind.options, kind.model, dump=str(folder)) as (two, one):
        for source, sink, first in ((two, one, 5400), (one, two, 5500)):
            for file in folder.glob("*.npy"):
                file.unlink()
            before = asyncio.run(sink.numbers())
            asyncio.run(handoffs(source, sink, first, kind))
            now = asyncio.run(sink.numbers())
            assert now["kv_ranks_not_received_total"] == before["kv_ranks_not_received_total"]
            offered, received = (
                dumped(folder, side, kind.heads) for side in ("offered", "received")
            )
            assert received.keys() == offered.keys()
            assert len(received) >= REQUESTS
            for name, pages in offered.items():
                assert pages.any()
                assert np.array_equal(pages, received[name]), name
            print(
                f"\n{kind.name}, {source.name} to {sink.name}: {len(received)} offers, "
                f"{sum(pages.nbytes for pages in received.values()) / 1e6:.1f} MB equal"
            )
