"""Tests by example of plans that copy KV between memory layouts: number of byte ranges, refusals.

A property test checks every byte.
"""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import weakref

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.layout import transfer_plan as planning
from kvtransfer.layout.byte_ranges import RankPair, Segments, build_runs, split_segments
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.layout.transfer_plan import (
    MAX_RUNS,
    LayoutMismatch,
    PlannedWindow,
    TransferPlan,
    layers_per_group,
    max_pairs,
    plan_transfer,
)
from kvtransfer.protocol import agent_messages

SMALL = KvLayout(layers=4, kv_heads=4, head_dim=8, dtype=KvDtype.BF16, block_tokens=16)
BLOCK = SMALL.rank_block_bytes(0)


def shape(transfer_plan: TransferPlan, group: int = 0) -> list[tuple[RankPair, list[int]]]:
    return [
        (pair, transfer_plan.runs(group, i).length.tolist())
        for i, pair in enumerate(transfer_plan.pairs(group))
    ]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ((1, 1), (1, 1)),
        ((8, 1), (8, 1)),
        ((2, 3), (4, 2)),
        ((16, 2), (2, 4)),
        ((1, 4), (64, 4)),
        ((64, 1), (1, 3)),
    ],
)
@pytest.mark.parametrize("group_layers", [1, 3, 4])
def test_how_many_pairs_a_plan_looks_at_is_known_beforehand(
    src: tuple[int, int], dst: tuple[int, int], group_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, overlap = [0], planning._overlap

    def counted(one: range, other: range) -> range:
        looks[0] += 1
        return overlap(one, other)

    monkeypatch.setattr(planning, "_overlap", counted)
    layouts = [replace(SMALL, tp=tp, pp=pp) for tp, pp in (src, dst)]
    plan_transfer(*layouts, [0], [0], 16, group_layers=group_layers)
    most = max_pairs(*layouts, group_layers)
    assert looks[0] <= 2 * most
    assert most <= 2 * looks[0]


def test_equal_layouts_move_one_run_per_scattered_block() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, [5, 3, 8], [1, 7, 0], 48)
    assert transfer_plan.groups == 1
    assert transfer_plan.runs(0, 0).src.tolist() == [5 * BLOCK, 3 * BLOCK, 8 * BLOCK]
    assert transfer_plan.runs(0, 0).dst.tolist() == [1 * BLOCK, 7 * BLOCK, 0]
    assert shape(transfer_plan) == [(RankPair(0, 0), [BLOCK] * 3)]


def test_the_first_plan_of_a_process_imports_no_module() -> None:
    code = (
        "import sys\n"
        "from kvtransfer.layout.kv_layout import KvDtype, KvLayout\n"
        "from kvtransfer.layout.transfer_plan import plan_transfer\n"
        "p = KvLayout(layers=4, kv_heads=4, head_dim=8, dtype=KvDtype.BF16, block_tokens=16)\n"
        "before = set(sys.modules)\n"
        "plan_transfer(p, p, [5, 3, 8], [1, 7, 0], 40).runs(0, 0)\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("order", KvOrder)
@pytest.mark.parametrize(("skip", "tokens"), [(0, 16), (3, 9), (16, 20)])
def test_a_request_of_one_block_is_planned_like_that_block_of_a_longer_one(
    order: KvOrder, skip: int, tokens: int
) -> None:
    src = replace(SMALL, order=order, content=KvContent.TOKENS, blocks=32, tp=2)
    dst = replace(SMALL, content=KvContent.TOKENS, blocks=32)
    for blocks in ([5, 9], [11, 2], [5, 30]):
        few = plan_transfer(src, dst, blocks, blocks[::-1], tokens, skip_tokens=skip)
        segments = split_segments(
            src, dst, np.array(blocks), np.array(blocks[::-1]), range(skip, few.tokens.stop)
        )
        twice = Segments(*(np.concatenate([column, column]) for column in segments))
        for pair, share in enumerate(few._division.shares[0]):
            one, both = few.runs(0, pair), build_runs(src, dst, twice, share, 1 << 20)
            moved = {
                (a + i, b + i)
                for a, b, n in zip(one.src, one.dst, one.length, strict=True)
                for i in range(n)
            }
            assert moved == {
                (a + i, b + i)
                for a, b, n in zip(both.src, both.dst, both.length, strict=True)
                for i in range(n)
            }


def test_neighbouring_blocks_become_one_run() -> None:
    assert shape(plan_transfer(SMALL, SMALL, [5, 6, 7, 9], [1, 2, 3, 4], 64)) == [
        (RankPair(0, 0), [3 * BLOCK, BLOCK])
    ]


def test_a_group_of_layers_is_one_run_of_each_block() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, [5, 6], [1, 2], 32, group_layers=3)
    assert [shape(transfer_plan, group) for group in range(transfer_plan.groups)] == [
        [(RankPair(0, 0), [3 * BLOCK // 4] * 2)],
        [(RankPair(0, 0), [BLOCK // 4] * 2)],
    ]
    assert (transfer_plan.group_bytes(0), transfer_plan.n_bytes) == (2 * 3 * BLOCK // 4, 2 * BLOCK)


def test_a_long_run_is_cut() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, [5, 6], [1, 2], 32, max_run_bytes=BLOCK - 1)
    assert shape(transfer_plan) == [(RankPair(0, 0), [BLOCK - 1, BLOCK - 1, 2])]
    assert transfer_plan.runs(0, 0).src.tolist() == [5 * BLOCK, 6 * BLOCK - 1, 7 * BLOCK - 2]


def test_the_last_block_is_moved_whole_and_a_first_one_in_rows_of_a_head() -> None:
    assert shape(plan_transfer(SMALL, SMALL, [5, 3], [1, 7], 17)) == [
        (RankPair(0, 0), [BLOCK, BLOCK])
    ]
    ((_, lengths),) = shape(plan_transfer(SMALL, SMALL, [5, 3], [1, 7], 17, skip_tokens=14))
    assert lengths == [2 * SMALL.row_bytes] * (4 * 2 * 4) + [BLOCK]


def test_half_the_ranks_each_take_from_two() -> None:
    transfer_plan = plan_transfer(replace(SMALL, tp=4), replace(SMALL, tp=2), [0], [0], 16)
    assert transfer_plan.pairs(0) == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert shape(transfer_plan)[1] == (RankPair(1, 0), [16 * SMALL.row_bytes] * (4 * 2))


def test_repeated_heads_are_taken_from_every_holder_in_turn() -> None:
    many = replace(SMALL, kv_heads=2, tp=8)
    transfer_plan = plan_transfer(many, replace(many, tp=2), [0], [0], 16, group_layers=1)
    assert [transfer_plan.pairs(group) for group in range(4)] == [
        ((0, 0), (4, 1)),
        ((1, 0), (5, 1)),
        ((2, 0), (6, 1)),
        ((3, 0), (7, 1)),
    ]
    assert plan_transfer(many, many, [0], [0], 16).pairs(0) == tuple(
        (rank, rank) for rank in range(8)
    )


def test_a_latent_goes_to_every_rank_from_one_each() -> None:
    latent = replace(SMALL, kv_heads=1, mla=True, tp=2)
    transfer_plan = plan_transfer(latent, replace(latent, tp=4), [0], [0], 16)
    assert transfer_plan.pairs(0) == ((0, 0), (0, 1), (1, 2), (1, 3))


def test_stages_meet_only_where_they_share_layers() -> None:
    transfer_plan = plan_transfer(
        replace(SMALL, pp=2), replace(SMALL, pp=4), [0], [0], 16, group_layers=2
    )
    assert [transfer_plan.pairs(group) for group in range(2)] == [
        ((0, 0), (0, 1)),
        ((1, 2), (1, 3)),
    ]


def test_another_order_is_cut_into_rows() -> None:
    transfer_plan = plan_transfer(SMALL, replace(SMALL, order=KvOrder.BLNHC), [0], [0], 16)
    assert shape(transfer_plan) == [(RankPair(0, 0), [SMALL.row_bytes] * (4 * 2 * 4 * 16))], (
        "few could be joined, so none is"
    )
    one_head = replace(SMALL, tp=4)
    assert (
        len(
            plan_transfer(one_head, replace(one_head, order=KvOrder.BLNHC), [0], [0], 16)
            .runs(0, 0)
            .length
        )
        == 1
    )


def test_windows_are_filled_to_the_limit_and_a_longer_run_stands_alone() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, [5, 3, 8, 10, 12], [1, 3, 5, 7, 9], 80)
    assert list(transfer_plan.windows(0, 2 * BLOCK)) == [
        (0, 0, 2, 2 * BLOCK),
        (0, 2, 2, 2 * BLOCK),
        (0, 4, 1, BLOCK),
    ]
    assert list(transfer_plan.windows(0, 2 * BLOCK - 1)) == [
        PlannedWindow(0, i, 1, BLOCK) for i in range(5)
    ]
    assert list(transfer_plan.windows(0, 1)) == [PlannedWindow(0, i, 1, BLOCK) for i in range(5)]
    cut = transfer_plan.runs(0, 0).cut(1, 2)
    assert (cut.src.tolist(), cut.count, cut.n_bytes) == ([3 * BLOCK, 8 * BLOCK], 2, 2 * BLOCK)


def test_groups_are_ready_when_all_their_layers_are() -> None:
    transfer_plan = plan_transfer(
        replace(SMALL, layers=7), replace(SMALL, layers=7), [0], [0], 16, group_layers=3
    )
    assert [transfer_plan.ready_groups(layers) for layers in range(9)] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        3,
        3,
    ]
    assert [transfer_plan.layers(group) for group in range(3)] == [
        range(3),
        range(3, 6),
        range(6, 7),
    ]


def test_a_group_is_large_enough_to_keep_a_link_busy() -> None:
    llama = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype=KvDtype.BF16, block_tokens=16)
    assert layers_per_group(llama, 512) == 3  # 2 MiB a layer
    assert layers_per_group(llama, 1 << 20) == 1
    assert layers_per_group(llama, 1) == 32


@pytest.mark.parametrize(
    "change", [{"layers": 5}, {"dtype": KvDtype.FP16}, {"head_dim": 4}, {"kv_heads": 2}]
)
def test_impossible_fetches_are_refused_with_a_reason(change: dict[str, int]) -> None:
    with pytest.raises(LayoutMismatch, match=f"{next(iter(change))} differs"):
        plan_transfer(SMALL, replace(SMALL, **change), [0], [0], 16)


@pytest.mark.parametrize(
    ("src_blocks", "dst_blocks", "tokens", "skip"),
    [
        ([0], [0], 17, 0),
        ([0, 1], [0], 17, 0),
        ([0], [0], 16, 16),
        ([0], [0], 0, 0),
        ([0], [0], 16, -1),
        ([-1], [0], 16, 0),
        ([1 << 31], [0], 16, 0),
        ([1 << 70], [0], 16, 0),
        ([0.5], [0], 16, 0),
        ([0, 1], [2, 2], 32, 0),
    ],
)
def test_blocks_that_cannot_hold_the_tokens_are_refused(
    src_blocks: list[int], dst_blocks: list[int], tokens: int, skip: int
) -> None:
    with pytest.raises(
        ValueError, match=r"do not fit|not a valid range|invalid block|a block twice"
    ):
        plan_transfer(SMALL, SMALL, src_blocks, dst_blocks, tokens, skip_tokens=skip)


def test_groups_and_pairs_outside_the_plan_are_index_errors() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, [5, 3], [1, 7], 32)
    for ask in (
        lambda: transfer_plan.runs(1, 0),
        lambda: transfer_plan.runs(0, 1),
        lambda: transfer_plan.runs(0, -1),
        lambda: transfer_plan.pairs(-1),
        lambda: transfer_plan.runs(0, 0).cut(1, 2),
        lambda: transfer_plan.runs(0, 0).cut(-1, 1),
        lambda: transfer_plan.runs(0, 0).cut(0, 0),
    ):
        with pytest.raises(IndexError):
            ask()


def test_however_much_is_cut_again_a_group_has_few_runs_of_a_pair() -> None:
    # Runs are computed while other links wait, so there must not be too many.
    other, blocks = replace(SMALL, order=KvOrder.BLNHC), list(range(0, 1600, 2))
    transfer_plan = plan_transfer(SMALL, other, blocks, blocks, 800 * 16, group_layers=1)
    runs_of_block = 16 * 4 * 2
    assert transfer_plan.groups == 4 * 2, "layers, and tokens in two chunks each"
    counts = [transfer_plan.runs(group, 0).count for group in range(transfer_plan.groups)]
    assert counts == [MAX_RUNS, 800 * runs_of_block - MAX_RUNS] * 4
    assert [len(transfer_plan.layers(group)) for group in range(transfer_plan.groups)] == [1] * 8
    assert (
        sum(transfer_plan.group_bytes(group) for group in range(transfer_plan.groups))
        == 800 * BLOCK
    )
    assert [transfer_plan.ready_groups(layers) for layers in range(6)] == [0, 2, 4, 6, 8, 8]
    assert [transfer_plan.complete_layers(groups) for groups in range(9)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
    ]


def test_a_plan_goes_with_its_last_user() -> None:
    gc.disable()
    try:
        transfer_plan = plan_transfer(SMALL, SMALL, [5], [1], 16)
        alive = weakref.ref(transfer_plan.runs(0, 0).src)
        assert alive() is not None
        del transfer_plan
        assert alive() is None
    finally:
        gc.enable()


def test_spare_blocks_behind_the_tokens_are_left_alone() -> None:
    transfer_plan = plan_transfer(SMALL, SMALL, np.array([5, 6, 7]), np.array([1, 2, 3]), 20)
    assert shape(transfer_plan) == [(RankPair(0, 0), [2 * BLOCK])]


def test_agents_of_one_version_make_the_same_plans() -> None:
    # Agents refer to runs by index. If this fails, plans have changed: raise agent_messages.VERSION.
    digest = hashlib.sha256()
    at_most = {"group_layers": 3, "max_run_bytes": 3000, "max_runs": 100}
    for change in (
        {},
        {"tp": 2},
        {"pp": 3},
        {"block_tokens": 8},
        {"block_tokens": 24},
        {"order": KvOrder.BLNHC},
        {"order": KvOrder.LBHNC, "content": KvContent.HEADS, "blocks": 10},
    ):
        other = replace(SMALL, **change)
        for src, dst in ((SMALL, other), (other, SMALL)):
            transfer_plan = plan_transfer(
                src, dst, range(9, 0, -1), range(9), 70, skip_tokens=3, **at_most
            )
            for group in range(transfer_plan.groups):
                digest.update(repr(list(transfer_plan.windows(group, 4000))).encode())
                for number, pair in enumerate(transfer_plan.pairs(group)):
                    runs = transfer_plan.runs(group, number)
                    digest.update(
                        repr(
                            (pair, runs.src.tolist(), runs.dst.tolist(), runs.length.tolist())
                        ).encode()
                    )
    assert (agent_messages.VERSION, digest.hexdigest()[:16]) == (6, "59afa0767f122ea5")


@pytest.mark.parametrize("most_runs", [1, 7, 1 << 16])
def test_the_bytes_of_all_groups_are_those_of_each(most_runs: int) -> None:
    src = KvLayout(layers=5, kv_heads=4, head_dim=8, dtype=KvDtype.BF16, block_tokens=16, tp=2)
    dst = msgspec.structs.replace(src, tp=4, block_tokens=24)
    transfer_plan = plan_transfer(
        src, dst, range(9), range(6), 130, skip_tokens=7, group_layers=2, max_runs=most_runs
    )
    pieces = [
        sum(
            transfer_plan.runs(group, pair).n_bytes
            for pair in range(len(transfer_plan.pairs(group)))
        )
        for group in range(transfer_plan.groups)
    ]
    assert (
        transfer_plan.bytes_by_group()
        == [transfer_plan.group_bytes(group) for group in range(transfer_plan.groups)]
        == pieces
    )
    assert transfer_plan.n_bytes == sum(pieces)


VLLM_CPU = replace(SMALL, order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=10)


def copied(src: KvLayout, dst: KvLayout, memory: np.ndarray) -> np.ndarray:
    sink = np.zeros(10 * dst.rank_block_bytes(0), np.uint8)
    plan = plan_transfer(src, dst, [0], [0], 16)
    for number, pair in enumerate(plan.pairs(0)):
        runs = plan.runs(0, number)
        for at, to, length in zip(runs.src, runs.dst, runs.length, strict=True):
            sink[to : to + length] = memory[pair.src_rank][at : at + length]
    return sink


def test_a_wrong_content_would_put_heads_of_two_ranks_into_wrong_places_without_an_error() -> None:
    # Equal sizes prove nothing.
    #
    # Therefore the arrangement of keys and values is part of the layout.
    one = VLLM_CPU
    two = replace(one, tp=2)
    shape = (one.layers, 10, one.kv_heads, 2, 16, one.row_bytes)
    whole = np.random.default_rng(7).integers(1, 256, shape, np.uint8)
    ranks = np.stack([whole[:, :, :2].ravel(), whole[:, :, 2:].ravel()])
    right = np.zeros(shape, np.uint8)
    right[:, 0] = whole[:, 0]
    np.testing.assert_array_equal(copied(two, one, ranks), right.ravel())
    wrong = [replace(layout, content=KvContent.PLANES) for layout in (two, one)]
    assert (copied(*wrong, ranks) != right.ravel()).mean() > 0.04


def test_layers_are_runs_of_neighbouring_blocks_where_they_are_outermost() -> None:
    plan = plan_transfer(VLLM_CPU, VLLM_CPU, [2, 3, 4], [5, 6, 7], 48)
    assert shape(plan) == [(RankPair(0, 0), [3 * VLLM_CPU.rank_layer_bytes] * 4)]


def test_a_block_behind_the_end_of_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid block number"):
        plan_transfer(VLLM_CPU, VLLM_CPU, [10], [0], 16)


def test_pages_move_whole_and_only_whole() -> None:
    pages = replace(VLLM_CPU, content=KvContent.PAGES, page_format="cpu-amx")
    page = 2 * 16 * pages.row_bytes
    plan = plan_transfer(pages, replace(pages, tp=2), [2, 5], [1, 7], 20, skip_tokens=16)
    assert shape(plan) == [(RankPair(0, rank), [2 * page] * 4) for rank in (0, 1)]
    with pytest.raises(
        ValueError, match="a transfer of whole pages of 16 tokens cannot begin at token 3"
    ):
        plan_transfer(pages, pages, [2, 5], [1, 7], 20, skip_tokens=3)
    for change in (
        {"block_tokens": 32},
        {"page_format": "cpu-vec"},
        {"content": KvContent.HEADS, "page_format": ""},
    ):
        with pytest.raises(LayoutMismatch):
            plan_transfer(pages, replace(pages, **change), [2, 5], [1, 7], 20)
