"""Tests of the texts by which a decode engine finds the KV of a prompt (handoffs).

They are valid once, only for their prompt, and only with the fleet's key.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kvtransfer.engines.vllm.handoff_params import (
    EngineCard,
    HandoffRefused,
    WorkerAddress,
    digest_prompt,
    open_card,
    open_handoff,
    seal_card,
)
from kvtransfer.engines.vllm.handoff_scheduler import (
    CARD,
    MEMBER,
    TRANSFER,
    HandoffScheduler,
    PromptRequest,
)
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.protocol.ticket import AHEAD, check

KEY = b"k" * 32
EPOCH = b"e" * 16
LAYOUT = KvLayout(
    2, kv_heads=2, head_dim=8, dtype=KvDtype.FP32, block_tokens=4,
    order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=9,
)  # fmt: skip
PROMPT = list(range(11))


def scheduler(
    warnings: list[str] | None = None,
    *,
    key: bytes = KEY,
    family: str = "f",
    window: int = 0,
    **layout: int,
) -> HandoffScheduler:
    said = warnings if warnings is not None else []
    made = HandoffScheduler(
        key, "engine", family, lease_s=30.0, clock=lambda: 100.0, warn=said.append, window=window
    )
    ranks = range(layout.get("tp", 1))
    workers = [WorkerAddress(f"127.0.0.1:{900 + rank}", f"p{rank}", EPOCH) for rank in ranks]
    made.set_workers(workers, replace(LAYOUT, **layout))
    return made


def offered(
    source: HandoffScheduler, prompt: list[int] = PROMPT, blocks: Sequence[int] = (3, 5, 7)
) -> dict[str, object]:
    params = source.finish_prefill(PromptRequest("p1", prompt, {}), blocks, len(prompt))
    assert params is not None
    return params


def test_a_handoff_is_loaded_for_its_prompt() -> None:
    source, sink = scheduler(), scheduler()
    params = offered(source)
    (offer,) = source.take_orders(True).offers
    assert (offer.request, offer.blocks, offer.tokens, offer.ttl_s) == ("p1", [3, 5, 7], 11, 30.0)
    request = PromptRequest("d1", PROMPT, params)
    assert sink.loadable_tokens(request, 4) == 7
    assert sink.loadable_tokens(request, 4) == 7
    sink.begin_load("d1", [1, 2, 8], 7)
    (load,) = sink.take_orders(False).loads
    assert (load.name, load.blocks, load.tokens, load.skip) == (offer.name, [1, 2, 8], 11, 4)
    ticket = check(KEY, load.sources[0].ticket, 129.0, epoch=EPOCH, sink="any")
    assert (ticket.offer, ticket.nonce, ticket.digest) == (offer.name, offer.nonces[0], AHEAD)
    assert sink.counts.take() == {"kv_handoffs_accepted": 1}
    assert source.counts.take() == {"kv_handoffs_offered": 1}
    assert source.counts.take() == {}


def test_a_longer_prompt_loads_the_part_that_was_offered() -> None:
    source, sink = scheduler(), scheduler()
    request = PromptRequest("d1", [*PROMPT, 99, 98], offered(source))
    assert sink.loadable_tokens(request, 0) == 11


@pytest.mark.parametrize(
    ("prompt", "variant"),
    [([*PROMPT[:-1], 99], ""), (PROMPT[:-1], ""), (PROMPT, "adapter"), ([], "")],
)
def test_a_handoff_replayed_with_another_prompt_is_computed(
    prompt: list[int], variant: str
) -> None:
    warnings: list[str] = []
    source, sink = scheduler(), scheduler(warnings)
    request = PromptRequest("d1", prompt, offered(source), variant)
    assert sink.loadable_tokens(request, 0) == 0
    assert warnings == [
        "request d1: the handoff was made for another prompt; the prompt is computed here"
    ]
    assert sink.loadable_tokens(request, 0) == 0
    assert (len(warnings), sink.counts.take()) == (1, {"kv_handoffs_refused": 1})
    assert not sink.has_pending_work


def test_a_handoff_of_another_fleet_or_another_model_is_computed() -> None:
    for source, reason in (
        (scheduler(key=b"x" * 32), "signature of the handoff is invalid"),
        (scheduler(family="g"), "is g, this engine's is f"),
    ):
        warnings: list[str] = []
        request = PromptRequest("d1", PROMPT, offered(source))
        sink = scheduler(warnings)
        assert sink.loadable_tokens(request, 0) == 0
        assert reason in warnings[0]
        assert not sink.has_pending_work


@pytest.mark.parametrize("text", [7, None, "", "=", "A" * 100, "é" * 100, "A" * (1 << 21)])
def test_text_that_is_no_handoff_is_refused(text: object) -> None:
    with pytest.raises(HandoffRefused):
        open_handoff(KEY, text)


def test_every_changed_byte_of_a_handoff_is_detected() -> None:
    text = str(offered(scheduler())[MEMBER])
    for index in range(0, len(text) - 3, 7):
        other = "A" if text[index] != "A" else "B"
        with pytest.raises(HandoffRefused):
            open_handoff(KEY, text[:index] + other + text[index + 1 :])


def test_a_request_uses_its_handoff_once() -> None:
    sink, request = scheduler(), PromptRequest("d1", PROMPT, offered(scheduler()))
    assert sink.loadable_tokens(request, 0) == 11
    sink.begin_load("d1", [1, 2, 3], 11)
    sink.begin_load("d1", [1, 2, 3], 0)
    assert sink.loadable_tokens(request, 0) == 0
    orders = sink.take_orders(False)
    assert (len(orders.loads), orders.unused) == (1, [])


def test_a_handoff_that_is_not_needed_is_released_at_its_source() -> None:
    sink, request = scheduler(), PromptRequest("d1", PROMPT, offered(scheduler()))
    assert sink.loadable_tokens(request, 12) == 0
    sink.begin_load("d1", [1, 2, 3], 0)
    assert sink.has_pending_work
    (unused,) = sink.take_orders(False).unused
    assert unused.request == "d1"
    assert (sink.counts.take(), sink.has_pending_work) == ({"kv_handoffs_cached": 1}, False)


def test_an_aborted_request_cancels_its_load_or_releases_its_handoff() -> None:
    source = scheduler()
    loading, waiting = (PromptRequest(name, PROMPT, offered(source)) for name in ("d1", "d2"))
    sink = scheduler()
    for request in (loading, waiting):
        assert sink.loadable_tokens(request, 0) == 11
    sink.begin_load("d1", [1, 2, 3], 11)
    sink.forget("d1")
    sink.forget("d2")
    orders = sink.take_orders(False)
    assert (orders.cancels, [order.request for order in orders.unused]) == (["d1"], ["d2"])
    assert sink.has_pending_work
    sink.on_ended([], ["d1"])
    assert not sink.has_pending_work


def test_an_engine_steps_until_its_offers_have_ended() -> None:
    source = scheduler()
    offered(source)
    source.take_orders(True)
    assert source.has_pending_work
    source.on_ended(["p1"], [])
    assert not source.has_pending_work


def test_every_rank_has_a_ticket_and_a_missing_worker_is_refused() -> None:
    source = scheduler(tp=2)
    handoff = open_handoff(KEY, offered(source)[MEMBER])
    assert [item.address for item in handoff.sources] == ["127.0.0.1:900", "127.0.0.1:901"]
    assert len({item.ticket for item in handoff.sources}) == 2
    with pytest.raises(
        ValueError, match="1 workers have a KV agent, but the layout needs one for each of its 2"
    ):
        source.set_workers([WorkerAddress("a:1", "p0", EPOCH)], replace(LAYOUT, tp=2))


def test_the_handoff_has_the_members_that_gateways_check() -> None:
    params = offered(scheduler())
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == (
        "127.0.0.1",
        900,
        1,
    )
    assert params["remote_block_ids"] == [[3, 5, 7]]


def test_a_handoff_has_only_the_blocks_within_a_sliding_window() -> None:
    source, sink = scheduler(window=5), scheduler(window=5)
    params = offered(source, blocks=[0, 5, 7])
    (offer,) = source.take_orders(True).offers
    assert (offer.blocks, offer.tokens) == ([5, 7], 6)
    assert sink.loadable_tokens(PromptRequest("d1", PROMPT, params), 0) == 10
    sink.begin_load("d1", [0, 2, 8], 10)
    (load,) = sink.take_orders(False).loads
    assert (load.blocks, load.tokens, load.skip) == ([2, 8], 6, 0)
    assert source.finish_prefill(PromptRequest("p2", PROMPT, {}), [0, 0, 7], 11) is None


def test_a_sliding_window_needs_blocks_of_one_size() -> None:
    said: list[str] = []
    sink = scheduler(said, window=5, block_tokens=8)
    params = offered(scheduler(window=5), blocks=[0, 5, 7])
    assert sink.loadable_tokens(PromptRequest("d1", PROMPT, params), 0) == 0
    assert "sliding window" in said[0]


def test_prompts_differ_by_tokens_and_by_variant() -> None:
    digests = {
        digest_prompt([1, 2]), digest_prompt([1, 2, 0]), digest_prompt([2, 1]),
        digest_prompt([1, 2], "a"), digest_prompt([1, 2], "b"),
    }  # fmt: skip
    assert len(digests) == 5


def announced(source: HandoffScheduler, transfer: object = "t1") -> dict[str, object]:
    # Return the decode request's kv_transfer_params for a prompt that the source computes in parts.
    give = PromptRequest("p1", PROMPT, {"do_remote_decode": True, TRANSFER: transfer})
    source.begin_prefill(give)
    source.on_step([PromptChunk("p1", 0, 11)], lambda _: [3, 5, 7])
    end = source.end_prefill("p1", [3, 5, 7], len(PROMPT), is_whole=True)
    card = end[1][CARD] if end is not None else source._card
    return {"do_remote_prefill": True, TRANSFER: transfer, CARD: card}


def parts_scheduler(warnings: list[str] | None = None, **kwargs: object) -> HandoffScheduler:
    made = scheduler(warnings, **kwargs)  # type: ignore[arg-type]
    made._part_tokens = 8
    made.set_workers(made._workers, LAYOUT)
    return made


def test_kv_in_parts_is_loaded_by_names_that_both_engines_compute() -> None:
    source, sink = parts_scheduler(), parts_scheduler()
    params = announced(source)
    orders = source.take_orders(True)
    assert [(offer.tokens, offer.blocks) for offer in orders.offers] == [
        (8, [3, 5]),
        (11, [3, 5, 7]),
    ]
    assert orders.ends == ["p1"]
    request = PromptRequest("d1", PROMPT, params)
    assert sink.loadable_tokens(request, 0) == 11
    sink.begin_load("d1", [1, 2, 8], 11)
    loads = sink.take_orders(False).loads
    assert [load.name for load in loads] == [offer.name for offer in orders.offers]
    assert [(load.skip, load.tokens) for load in loads] == [(0, 8), (8, 11)]
    assert [load.sources[0].ticket for load in loads] == [None, None]


def test_parts_that_are_cached_are_released_and_not_loaded() -> None:
    source, sink = parts_scheduler(), parts_scheduler()
    request = PromptRequest("d1", PROMPT, announced(source))
    assert sink.loadable_tokens(request, 8) == 3
    sink.begin_load("d1", [1, 2, 8], 3)
    orders = sink.take_orders(False)
    assert [(load.skip, load.tokens) for load in orders.loads] == [(8, 11)]
    assert [load.tokens for load in orders.unused] == [8]


@pytest.mark.parametrize("transfer", [None, 7, "", "t" * 513])
def test_without_a_valid_transfer_id_nothing_is_offered_or_loaded(transfer: object) -> None:
    warnings: list[str] = []
    source, sink = parts_scheduler(), parts_scheduler(warnings)
    params = announced(source, transfer)
    assert source.take_orders(True).offers == []
    assert sink.loadable_tokens(PromptRequest("d1", PROMPT, params), 0) == 0
    assert "kv_transfer is invalid, or the prompt is too short for it" in warnings[0]


def test_a_card_of_another_fleet_or_another_model_is_refused() -> None:
    for source, reason in (
        (parts_scheduler(key=b"x" * 32), "signature of the handoff is invalid"),
        (parts_scheduler(family="g"), "is g, this engine's is f"),
    ):
        warnings: list[str] = []
        sink = parts_scheduler(warnings)
        assert sink.loadable_tokens(PromptRequest("d1", PROMPT, announced(source)), 0) == 0
        assert reason in warnings[0]


def test_a_handoff_is_no_card_and_a_card_no_handoff() -> None:
    card = seal_card(KEY, EngineCard(["a:1"], LAYOUT, "f", 8))
    assert open_card(KEY, card) == EngineCard(["a:1"], LAYOUT, "f", 8)
    with pytest.raises(HandoffRefused):
        open_handoff(KEY, card)
    with pytest.raises(HandoffRefused):
        open_card(KEY, offered(scheduler())[MEMBER])
