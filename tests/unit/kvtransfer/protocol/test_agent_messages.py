"""Tests that messages between KV agents are decoded as they were encoded.

All other bytes raise a ProtocolError.
"""

from __future__ import annotations

import time
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.protocol.agent_messages import (
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    Accept,
    AgentCard,
    Beat,
    Credit,
    Invite,
    Landed,
    Lane,
    LinkHello,
    LinkReady,
    Message,
    ProtocolError,
    StopTransfer,
    Unwanted,
    Welcome,
    decode,
    encode,
    pack_blocks,
    unpack_blocks,
)
from kvtransfer.protocol.outcomes import EndReason

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype=KvDtype.BF16, block_tokens=16, tp=4)
CARD = AgentCard("p-0", bytes(range(16)), LAYOUT, "llama", "host", {"tcp": "127.0.0.1:1"})
INVITE = Invite(
    7, "request", pack_blocks(range(50)), 800, 16, 30.0, 5.0, 0, 1 << 20, "ticket", b"grant"
)
EVERY: list[Message] = [
    LinkHello(1, bytes(16), CARD, 16 << 20),
    Lane(1, bytes(16), CARD, bytes(16)),
    Welcome(1, bytes(16), CARD),
    LinkReady(),
    Beat(),
    INVITE,
    Accept(7, pack_blocks([3, 1, 2]), 8, 1 << 20),
    StopTransfer(7, EndReason.STALE, "why"),
    Landed(7, 1 << 30),
    Credit(7, 1 << 20),
    Unwanted("request", "ticket"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_a_message_decodes_to_the_same(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer": -1},
        {"transfer": 1 << 62},
        {"name": ""},
        {"name": "x" * 257},
        {"blocks": bytes(4 * MAX_BLOCKS + 4)},
        {"tokens": -1},
        {"tokens": 1 << 32},
        {"wait_s": -1.0},
        {"wait_s": float("nan")},
        {"slack_s": float("inf")},
        {"priority": 3},
        {"ticket": "t" * 1025},
        {"grant": bytes((64 << 10) + 1)},
        {"window_bytes": 1 << 48},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_no_message(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(msgspec.structs.replace(INVITE, **changes)))


def test_an_impossible_layout_is_not_a_valid_message() -> None:
    data = bytearray(encode(LinkHello(1, bytes(16), CARD, 0)))
    position = data.index(b"block_tokens") + len(b"block_tokens")
    assert data[position] == 16
    data[position] = 0
    with pytest.raises(ProtocolError):
        decode(bytes(data))


def test_nothing_may_be_added_to_a_message() -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode([8, 7, 100, "more"]))
    with pytest.raises(ProtocolError):
        decode(encode(Beat()) + b"\x00")


def test_too_much_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_nesting_without_end_is_no_message() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x91" * 1_000_000)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


def test_a_hundred_thousand_spoiled_messages_do_no_harm() -> None:
    rng, good = Random(20), [encode(message) for message in EVERY]
    began, refused = time.process_time(), 0
    for _ in range(100_000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 4)):
            position = rng.randrange(len(data) + 1)
            what = rng.randrange(3)
            if what == 0:
                data[position : position + 1] = bytes([rng.randrange(256)])
            elif what == 1:
                del data[position : position + rng.randrange(1, 9)]
            else:
                data[position:position] = rng.randbytes(rng.randrange(1, 9))
        try:
            decode(bytes(data))
        except ProtocolError:
            refused += 1
    assert refused > 50_000
    assert time.process_time() - began < 20


@settings(max_examples=50)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=200))
def test_blocks_travel_as_they_are(blocks: list[int]) -> None:
    assert unpack_blocks(pack_blocks(blocks)).tolist() == blocks
    assert unpack_blocks(pack_blocks(np.array(blocks, np.int64))).dtype == np.int64


@pytest.mark.parametrize(
    "message", [INVITE, Accept(7, b"", 8, 1 << 20)], ids=lambda message: type(message).__name__
)
def test_a_truncated_block_number_is_refused_when_the_message_is_decoded(
    message: Invite | Accept,
) -> None:
    with pytest.raises(ProtocolError, match="which is not a multiple of 4"):
        decode(encode(msgspec.structs.replace(message, blocks=b"12345")))
