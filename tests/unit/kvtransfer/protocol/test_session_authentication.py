"""Tests that a KV agent refuses agents without the key, and repeated, lost or altered messages."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.protocol.agent_messages import (
    VERSION,
    AgentCard,
    Beat,
    Credit,
    LinkHello,
    LinkReady,
    Message,
    ProtocolError,
    Welcome,
    encode,
)
from kvtransfer.protocol.session_authentication import (
    MOST_HELLO_BYTES,
    LinkSession,
    SealError,
    greeting_nonce,
    shows_key,
)

KEY = b"k" * 32
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype=KvDtype.BF16, block_tokens=16)
SINK, SOURCE = AgentCard("sink", b"s" * 16, LAYOUT), AgentCard("source", b"p" * 16, LAYOUT)


def pair(
    key: bytes = KEY, other: bytes = KEY, nonces: tuple[bytes, bytes] = (b"1" * 16, b"2" * 16)
) -> tuple[LinkSession, LinkSession]:
    sink = LinkSession(key, nonces[0], SINK, is_dialler=True, budget_bytes=5)
    return sink, LinkSession(other, nonces[1], SOURCE, is_dialler=False)


def shaken() -> tuple[LinkSession, LinkSession]:
    sink, source = pair()
    _, welcome = source.handle(sink.hello())
    assert welcome is not None
    _, ready = sink.handle(welcome)
    assert ready is not None
    assert source.handle(ready) == (None, None)
    return sink, source


def heard(session: LinkSession, data: bytes) -> Message | None:
    return session.handle(data)[0]


def test_two_ends_with_the_key_prove_their_identity() -> None:
    sink, source = shaken()
    assert (sink.peer, source.peer) == (SOURCE, SINK)
    assert sink.window_key == source.window_key
    assert len(sink.window_key) == 32
    assert source.budget_bytes == 5
    assert heard(source, sink.seal(Credit(1, 2))) == Credit(1, 2)
    assert heard(sink, source.seal(Beat())) == Beat()


def test_no_peer_is_proven_before_the_last_step() -> None:
    sink, source = pair()
    _, welcome = source.handle(sink.hello())
    assert source.peer is None
    assert welcome is not None
    sink.handle(welcome)
    assert source.peer is None


def test_the_dialling_end_detects_another_key() -> None:
    sink, source = pair(KEY, b"q" * 32)
    _, welcome = source.handle(sink.hello())
    assert welcome is not None
    with pytest.raises(SealError):
        sink.handle(welcome)


def test_a_ready_with_an_invalid_seal_is_refused() -> None:
    sink, source = pair()
    source.handle(sink.hello())
    with pytest.raises(SealError):
        source.handle(encode(LinkReady()) + bytes(16))


def test_a_recorded_conversation_cannot_be_replayed() -> None:
    sink, source = pair()
    hello = sink.hello()
    _, welcome = source.handle(hello)
    assert welcome is not None
    _, ready = sink.handle(welcome)
    later = LinkSession(KEY, b"3" * 16, SOURCE, is_dialler=False)
    later.handle(hello)
    assert ready is not None
    with pytest.raises(SealError):
        later.handle(ready)
    again = LinkSession(KEY, b"4" * 16, SINK, is_dialler=True)
    again.hello()
    with pytest.raises(SealError):
        again.handle(welcome)


def test_a_message_of_one_side_cannot_be_reflected() -> None:
    sink, _ = shaken()
    with pytest.raises(SealError):
        sink.handle(sink.seal(Beat()))


def test_a_hello_in_answer_to_a_hello_is_refused() -> None:
    sink, _ = pair()
    with pytest.raises(SealError):
        sink.handle(sink.hello())


@pytest.mark.parametrize(
    "first", [LinkReady(), Beat(), Welcome(VERSION, bytes(16), SINK), Credit(1, 1)]
)
def test_hello_comes_first(first: Message) -> None:
    _, source = pair()
    with pytest.raises(ProtocolError):
        source.handle(encode(first))


def test_a_hello_is_short() -> None:
    _, source = pair()
    with pytest.raises(ProtocolError):
        source.handle(bytes(MOST_HELLO_BYTES + 1))


def test_another_version_is_reported_in_the_handshake() -> None:
    sink, source = pair()
    hello = encode(
        msgspec.structs.replace(LinkHello(VERSION, b"1" * 16, SINK, 0), version=VERSION + 1)
    )
    source.handle(hello)
    assert source.version == VERSION + 1
    assert sink.version == VERSION


def test_a_hello_can_be_decoded_by_every_version() -> None:
    # An undecodable Hello would look like a broken link, which is retried.
    sink, _ = pair()
    assert len(msgspec.msgpack.decode(sink.hello())) == 5


def test_a_lane_greets_with_its_links_nonce() -> None:
    source = LinkSession(KEY, b"2" * 16, SOURCE, is_dialler=False)
    sink = LinkSession(KEY, b"1" * 16, SINK, is_dialler=True, lane_of=b"g" * 16)
    source.handle(sink.hello())
    assert (source.lane_of, source.greeting) == (b"g" * 16, b"1" * 16)


@settings(max_examples=200)
@given(st.integers(0, 3), st.randoms(use_true_random=False))
def test_any_change_of_the_stream_is_detected_at_the_first_message(kind: int, rng: Random) -> None:
    sink, source = shaken()
    frames = [sink.seal(Credit(number, number)) for number in range(6)]
    index = rng.randrange(5)
    harmed = list(frames)
    if kind == 0:
        bit = rng.randrange(len(frames[index]) * 8)
        harmed[index] = (int.from_bytes(frames[index], "big") ^ (1 << bit)).to_bytes(
            len(frames[index]), "big"
        )
    elif kind == 1:
        harmed.insert(index, frames[rng.randrange(6)])
    elif kind == 2:
        del harmed[index]
    else:
        harmed[index], harmed[index + 1] = harmed[index + 1], harmed[index]
    messages: list[Message | None] = []

    def take_all() -> None:
        for data in [*harmed, frames[0]]:
            messages.append(heard(source, data))  # noqa: PERF401

    with pytest.raises(SealError):
        take_all()
    assert messages == [Credit(number, number) for number in range(len(messages))]


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_by_name_in_the_handshake(data: bytes, dialled: bool) -> None:
    session = LinkSession(KEY, b"1" * 16, SINK, is_dialler=dialled)
    if dialled:
        session.hello()
    with pytest.raises((ProtocolError, SealError)):
        session.handle(data)
    assert session.peer is None


def test_a_greeting_shows_only_the_key_it_was_made_with() -> None:
    nonce = greeting_nonce(KEY, b"12345678")
    assert len(nonce) == 16
    assert shows_key(KEY, nonce)
    assert not shows_key(b"q" * 32, nonce)
    assert not shows_key(KEY, nonce[:-1] + bytes([nonce[-1] ^ 1]))
    assert greeting_nonce(KEY, b"87654321")[8:] != nonce[8:]
