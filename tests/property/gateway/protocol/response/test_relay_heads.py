"""Property tests of relaying response heads and whole bodies, also malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.relay_state import RelayState
from gateway.protocol.response.usage_and_error_search import (
    TokenUsage,
)
from tests.property.gateway.protocol.response.relay_feed import (
    CUTS,
    HEAD,
    OWN_HEADERS,
    PLAIN,
    ROLE,
    chunked,
    feed,
    read,
    whole_stream,
)


@given(
    CUTS,
    st.sampled_from(["length", "close", "chunked"]),
    st.sampled_from([None, "my-alias"]),
    st.booleans(),
)
def test_a_plain_response_is_relayed_the_same_however_it_is_cut(
    cuts: list[int], framing: str, alias: str | None, http_1_0: bool
) -> None:
    body = chunked(PLAIN, [7, 30]) if framing == "chunked" else PLAIN
    lines = {
        "length": b"Content-Length: %d\r\n" % len(PLAIN),
        "close": b"",
        "chunked": b"Transfer-Encoding: Chunked\r\n",
    }
    wire = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + lines[framing] + b"\r\n" + body
    )
    relay = feed(wire, cuts, eof=framing == "close", alias=alias, http_1_0=http_1_0)
    head, _, rest = relay.out.partition(b"\r\n\r\n")
    body_read = rest if http_1_0 or b"content-length" in head else read(relay.out)[1]
    assert body_read == (
        PLAIN.replace(b'"model":"served",', b'"model":"my-alias",') if alias else PLAIN
    )
    assert relay.usage == TokenUsage(5, 7, None)
    assert relay.finish_reason == "length"
    assert relay.first_tokens == 1
    assert not relay.failed


@given(
    CUTS,
    st.lists(
        st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 x\r\nlink: y\r\n\r\n"]),
        max_size=5,
    ),
)
def test_interim_responses_are_skipped(cuts: list[int], interim: list[bytes]) -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    assert feed(b"".join(interim) + wire, cuts).out == feed(wire, []).out


@given(st.binary(min_size=1, max_size=40), CUTS)
def test_bytes_after_the_end_are_dropped_and_prevent_reuse_of_the_connection(
    surplus: bytes, cuts: list[int]
) -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    relay = feed(wire + surplus, [len(HEAD) + 3])
    assert relay.out == feed(wire, []).out
    assert not relay.reusable


def test_thousands_of_interim_responses_do_not_exhaust_the_stack() -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    assert feed(b"HTTP/1.1 100 C\r\n\r\n" * 3000 + wire, []).state is RelayState.DONE


def test_several_connection_fields_are_combined() -> None:
    lines = (
        b"HTTP/1.1 200 OK\r\nconnection: x-a\r\nConnection: x-b , close\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    relay = feed(lines, [])
    assert (relay.state, relay.reusable) == (RelayState.DONE, False)
    assert feed(lines.replace(b", close", b""), []).reusable


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"transfer-encoding: chunked\r\ncontent-length: 3", "framing"),
        (b"content-length: 3\r\ncontent-length: 4", "framing"),
        (b"content-length: 3\r\ncontent-length: 3", "framing"),
        (b"content-length: +3", "framing"),
        (b"content-length: 3, 3", "framing"),
        (b"content-length: 0x3", "framing"),
        (b"transfer-encoding: gzip, chunked", "framing"),
        (b"transfer-encoding: identity", "framing"),
        (b"transfer-encoding: chunked\r\nTransfer-Encoding: chunked", "framing"),
        (b"transfer-encoding : chunked\r\ncontent-length: 3", "framing"),
        (b"transfer-encoding:\r\n chunked\r\ncontent-length: 3", "framing"),
    ],
)
def test_an_ambiguous_head_is_rejected(head: bytes, kind: str) -> None:
    relay = feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + b"abc", [])
    assert (relay.failure_kind, relay.out) == (kind, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"-1\r\nab\r\n",
        b"3\r\nabcde\r\n",
        b"3\nabc\r\n",
        b"1" * 20 + b"\r\n",
        b"0x3\r\nabc\r\n",
    ],
)
def test_malformed_chunks_break_the_response(body: bytes) -> None:
    good = chunked(ROLE.encode(), []).removesuffix(b"0\r\n\r\n")
    relay = feed(HEAD + good + body, [])
    assert relay.failure_kind == "framing"
    _, _, whole = read(relay.out, strict=False)
    assert not whole or b"stream_interrupted" in relay.out


def test_an_endless_head_is_rejected() -> None:
    relay = Relay(OWN_HEADERS)
    relay.feed(b"x-padding: " + b"a" * 65_000, 0.0)
    with pytest.raises(UpstreamError, match="longer than"):
        relay.feed(b"a" * 1000, 0.0)


def test_an_encoded_response_is_rejected() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"content-encoding: %b\r\ncontent-length: 2\r\n\r\n"
    )
    assert feed(head % b"gzip" + b"\x1f\x8b", []).failure_kind == "framing"
    assert feed(head % b"identity" + b"{}", []).out.endswith(b"{}")
    assert feed((head % b"gzip").replace(b"200", b"400") + b"\x1f\x8b", []).failure_kind is None


@pytest.mark.parametrize("reads", [1, 2, 7])
def test_a_head_above_64_kib_is_rejected_in_any_number_of_reads(reads: int) -> None:
    wire = (
        HEAD[:-2]
        + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 1000) for n in range(70))
        + b"\r\n"
        + b"5\r\ndata:\r\n"
    )
    relay = Relay(OWN_HEADERS)
    size = len(wire) // reads + 1
    for offset in range(0, (reads - 1) * size, size):
        relay.feed(wire[offset : offset + size], 0.0)
    with pytest.raises(UpstreamError, match="head is longer than"):
        relay.feed(wire[(reads - 1) * size :], 0.0)
    assert relay.head is None


@pytest.mark.parametrize("control", [b"\x00", b"\x01", b"\x0b", b"\x1b", b"\x7f"])
def test_control_bytes_in_a_content_type_are_rejected(control: bytes) -> None:
    relay = Relay(OWN_HEADERS)
    with pytest.raises(UpstreamError, match="control characters"):
        relay.feed(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/%bplain\r\ncontent-length: 2\r\n\r\nhi"
            % control,
            0.0,
        )


def test_many_interim_responses_are_skipped() -> None:
    relay = Relay(OWN_HEADERS)
    assert relay.feed(b"HTTP/1.1 103 \r\n\r\n" * 5000, 0.0) == b""
    assert relay.head is None
    relay.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", 0.0)
    assert relay.status == 0 or relay.is_committed
