"""A peer without the key, or one that repeats, drops, reorders or alters messages, is refused."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.layout import KvDtype, KvLayout
from kvtransfer.protocol.messages import (
    VERSION,
    Beat,
    Card,
    Credit,
    Hello,
    Message,
    ProtocolError,
    Ready,
    Welcome,
    encode,
)
from kvtransfer.protocol.session import (
    MOST_HELLO_BYTES,
    Session,
    Unproven,
    greeting_nonce,
    shows_key,
)

KEY = b"k" * 32
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype=KvDtype.BF16, block_tokens=16)
SINK, SOURCE = Card("sink", b"s" * 16, LAYOUT), Card("source", b"p" * 16, LAYOUT)


def pair(
    key: bytes = KEY, other: bytes = KEY, nonces: tuple[bytes, bytes] = (b"1" * 16, b"2" * 16)
) -> tuple[Session, Session]:
    sink = Session(key, nonces[0], SINK, dialled=True, budget_bytes=5)
    return sink, Session(other, nonces[1], SOURCE, dialled=False)


def shaken() -> tuple[Session, Session]:
    sink, source = pair()
    _, welcome = source.answer(sink.hello())
    assert welcome is not None
    _, ready = sink.answer(welcome)
    assert ready is not None
    assert source.answer(ready) == (None, None)
    return sink, source


def heard(session: Session, data: bytes) -> Message | None:
    return session.answer(data)[0]


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
    _, welcome = source.answer(sink.hello())
    assert source.peer is None
    assert welcome is not None
    sink.answer(welcome)
    assert source.peer is None


def test_the_dialling_end_detects_another_key() -> None:
    sink, source = pair(KEY, b"q" * 32)
    _, welcome = source.answer(sink.hello())
    assert welcome is not None
    with pytest.raises(Unproven):
        sink.answer(welcome)


def test_a_ready_with_an_invalid_seal_is_refused() -> None:
    sink, source = pair()
    source.answer(sink.hello())
    with pytest.raises(Unproven):
        source.answer(encode(Ready()) + bytes(16))


def test_a_recorded_conversation_cannot_be_replayed() -> None:
    sink, source = pair()
    hello = sink.hello()
    _, welcome = source.answer(hello)
    assert welcome is not None
    _, ready = sink.answer(welcome)
    later = Session(KEY, b"3" * 16, SOURCE, dialled=False)
    later.answer(hello)
    assert ready is not None
    with pytest.raises(Unproven):
        later.answer(ready)
    again = Session(KEY, b"4" * 16, SINK, dialled=True)
    again.hello()
    with pytest.raises(Unproven):
        again.answer(welcome)


def test_a_message_of_one_side_cannot_be_reflected() -> None:
    sink, _ = shaken()
    with pytest.raises(Unproven):
        sink.answer(sink.seal(Beat()))


def test_a_hello_in_answer_to_a_hello_is_refused() -> None:
    sink, _ = pair()
    with pytest.raises(Unproven):
        sink.answer(sink.hello())


@pytest.mark.parametrize(
    "first", [Ready(), Beat(), Welcome(VERSION, bytes(16), SINK), Credit(1, 1)]
)
def test_hello_comes_first(first: Message) -> None:
    _, source = pair()
    with pytest.raises(ProtocolError):
        source.answer(encode(first))


def test_a_hello_is_short() -> None:
    _, source = pair()
    with pytest.raises(ProtocolError):
        source.answer(bytes(MOST_HELLO_BYTES + 1))


def test_another_version_is_reported_in_the_handshake() -> None:
    sink, source = pair()
    hello = encode(msgspec.structs.replace(Hello(VERSION, b"1" * 16, SINK, 0), version=VERSION + 1))
    source.answer(hello)
    assert source.version == VERSION + 1
    assert sink.version == VERSION


def test_a_hello_can_be_decoded_by_every_version() -> None:
    """An undecodable Hello would look like a broken link, which is retried."""
    sink, _ = pair()
    assert len(msgspec.msgpack.decode(sink.hello())) == 5


def test_a_lane_greets_with_its_links_nonce() -> None:
    source = Session(KEY, b"2" * 16, SOURCE, dialled=False)
    sink = Session(KEY, b"1" * 16, SINK, dialled=True, lane_of=b"g" * 16)
    source.answer(sink.hello())
    assert (source.lane_of, source.greeting) == (b"g" * 16, b"1" * 16)


@settings(max_examples=200)
@given(st.integers(0, 3), st.randoms(use_true_random=False))
def test_any_change_of_the_stream_is_detected_at_the_first_message(kind: int, rng: Random) -> None:
    """Altered, repeated, dropped and reordered messages."""
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

    with pytest.raises(Unproven):
        take_all()
    assert messages == [Credit(number, number) for number in range(len(messages))]


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_by_name_in_the_handshake(data: bytes, dialled: bool) -> None:
    session = Session(KEY, b"1" * 16, SINK, dialled=dialled)
    if dialled:
        session.hello()
    with pytest.raises((ProtocolError, Unproven)):
        session.answer(data)
    assert session.peer is None


def test_a_greeting_shows_only_the_key_it_was_made_with() -> None:
    nonce = greeting_nonce(KEY, b"12345678")
    assert len(nonce) == 16
    assert shows_key(KEY, nonce)
    assert not shows_key(b"q" * 32, nonce)
    assert not shows_key(KEY, nonce[:-1] + bytes([nonce[-1] ^ 1]))
    assert greeting_nonce(KEY, b"87654321")[8:] != nonce[8:]
