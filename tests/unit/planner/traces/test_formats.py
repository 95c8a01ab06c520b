"""Tests that formats of traces are detected, and invalid input is reported with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.replay.block_chain import keys_of
from planner.traces import (
    READERS,
    TraceError,
    TraceRequest,
    agents,
    b2b,
    bailian,
    read_trace,
    sharegpt,
)
from planner.traces.access_log import access
from planner.traces.azure import azure

AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""


def session(**other: object) -> bytes:
    fields = {
        "id": "trace_1",
        "models": ["m"],
        "block_size": 64,
        "tool_tokens": 600,
        "system_tokens": 500,
        "requests": [
            {"t": 0.0, "type": "n", "in": 1600, "out": 20, "think": 0.0, "stop": "tool_use", "runs": [[1, 25]]},
            {"t": 30.0, "type": "subagent", "in": None, "out": None, "think": None, "runs": [], "agent": {
                "tool_tokens": 100, "system_tokens": 10,
                "requests": [{"t": 1.0, "type": "n", "in": 640, "out": 5, "think": 0.0, "runs": [[900, 10]]}]}},
            {"t": 60.0, "type": "n", "in": 2100, "out": 30, "think": 9.5, "runs": [[1, 25], [30, 8]]},
        ],
    }  # fmt: skip
    return json.dumps(fields | other).encode()


def chat(number: int, parent: int, turn: int, *blocks: int, at: float = 1.5) -> bytes:
    fields = {
        "chat_id": number,
        "parent_chat_id": parent,
        "timestamp": at,
        "input_length": len(blocks) * 16,
    }
    return json.dumps(
        fields | {"output_length": 9, "type": "text", "turn": turn, "hash_ids": blocks}
    ).encode()


def tokens(*ids: int, at_ns: int = 2_000_000_000) -> bytes:
    fields = {
        "input_toks": len(ids),
        "output_toks": 7,
        "arrival_time_ns": at_ns,
        "input_tok_ids": ids,
    }
    return json.dumps(fields).encode()


def logged(at: float, prompt: int | None, status: int = 200, **other: object) -> bytes:
    fields = {
        "time": at,
        "id": "r",
        "client": "c",
        "api": "chat",
        "status": status,
        "outcome": "ok",
        "done_us": 9,
    }
    return json.dumps(fields | {"prompt_tokens": prompt, "completion_tokens": 12} | other).encode()


def test_azure_counts_from_the_first_moment_and_knows_no_prefixes() -> None:
    requests = list(azure(AZURE.splitlines(keepends=True)))
    assert [
        (request.input_tokens, request.output_tokens, request.blocks) for request in requests
    ] == [
        (374, 44, ()),
        (396, 109, ()),
        (879, 1, ()),
    ]
    assert [request.arrival_s for request in requests] == pytest.approx(
        [0.0, 4.314579, 4.541977], abs=1e-6
    )


def test_a_session_is_a_closed_loop_and_its_subagent_another() -> None:
    first, second, inner = agents([session()])
    assert (first.session, first.think_s, first.arrival_s) == ("trace_1", None, 0.0)
    assert (second.session, second.think_s, second.output_tokens) == ("trace_1", 9.5, 30)
    assert (inner.session, inner.think_s, inner.arrival_s) == ("trace_1/1", None, 31.0)


def test_sessions_share_tools_and_system_prompt_alone() -> None:
    request, *_ = agents([session()])
    requests = list(
        agents([session(), session(id="trace_2"), session(id="trace_3", tool_tokens=601)])
    )
    other, third = requests[3], requests[6]
    assert len(request.blocks) == 3
    assert request.blocks[:2] == other.blocks[:2]
    assert request.blocks[2] != other.blocks[2]
    assert set(request.blocks) & set(third.blocks) == set()
    # The next turn's prompt begins with this one.
    assert requests[1].blocks[:3] == requests[0].blocks


def test_a_session_ends_where_its_context_grows_too_large() -> None:
    assert [request.input_tokens for request in agents([session()], most_context=2000)] == [
        1600,
        640,
    ]


def test_bailian_turns_are_one_session_with_their_16_token_blocks() -> None:
    requests = list(
        bailian(
            [
                chat(7, -1, 1, 1, 2),
                chat(9, 7, 2, 1, 2, 3),
                chat(11, 9, 3, 1, 2, 3, 4),
                chat(12, -1, 1, 5),
            ]
        )
    )
    assert [request.session for request in requests] == ["chat 7", "chat 7", "chat 7", "chat 12"]
    assert (
        requests[1].blocks,
        requests[1].block_tokens,
        requests[1].slo,
        requests[1].arrival_s,
    ) == (
        (1, 2, 3),
        16,
        "text",
        1.5,
    )


def test_token_ids_share_blocks_exactly_as_far_as_they_are_equal() -> None:
    request, two, three = sharegpt(
        [tokens(*range(40)), tokens(*range(32), 99), tokens(5, *range(1, 40))]
    )
    assert request.blocks[:2] == two.blocks[:2]
    assert request.blocks[2] != two.blocks[2]
    assert set(request.blocks) & set(three.blocks) == set()
    assert request.arrival_s == 2.0


def test_our_own_log_is_replayed_in_order_of_arrival_without_what_was_refused() -> None:
    lines = [
        logged(101.0, 50, tenant="b"),
        logged(
            100.0,
            40,
            received_us=500_000,
            slo="fast",
            session="prefix",
            session_id=0x5E,
            blocks=[4, 5],
            block_tokens=16,
        ),
        logged(99.0, None, status=429),
        logged(103.0, 10, status=502),
    ]
    first, second = access(lines)
    assert (first.arrival_s, first.input_tokens, first.slo, first.session) == (
        0.0,
        40,
        "fast",
        "5e",
    )
    assert (first.blocks, first.block_tokens) == ((4, 5), 16)
    assert (second.arrival_s, second.tenant, second.blocks) == (0.5, "b", ())


def test_lengths_without_reported_usage_are_estimated() -> None:
    (request,) = access([logged(1.0, None, completion_tokens=None, body_bytes=4000, events=12)])
    assert (request.input_tokens, request.output_tokens) == (1000, 10)


def test_b2b_sends_at_its_rate_with_shared_customer_prompts() -> None:
    requests = list(b2b(20.0, 200.0, seed=3))
    assert len(requests) / 200 == pytest.approx(20.0, rel=0.1)
    assert {
        (request.input_tokens, request.output_tokens, len(request.blocks)) for request in requests
    } == {(7200, 1000, 15)}
    assert len({request.blocks[:11] for request in requests}) == 150
    assert len({request.blocks[11:] for request in requests}) == len(requests)
    assert requests == list(b2b(20.0, 200.0, seed=3))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (AZURE, "azure"),
        (session(), "agents"),
        (chat(1, -1, 1, 5), "bailian"),
        (tokens(1, 2), "sharegpt"),
        (logged(1.0, 5), "access"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}', "mooncake"),
    ],
)
def test_a_format_is_recognised_packed_or_not(tmp_path: Path, line: bytes, kind: str) -> None:
    plain, packed = tmp_path / "trace", tmp_path / "trace.gz"
    plain.write_bytes(line)
    packed.write_bytes(gzip.compress(line))
    assert read_trace(plain) == read_trace(packed) == read_trace(plain, kind)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("azure", b"2023-11-16 18:15:46.6,374"),
        ("azure", b"2023-19-16 18:15:46.6,374,4"),
        ("azure", b"2023-11-16 18:15:46.6,0,4"),
        pytest.param("azure", b"2023-11-16 18:15:46.6," + b"9" * 5000 + b",4", id="azure-digits"),
        ("agents", session(block_size=48)),
        (
            "agents",
            session(requests=[{"t": 0.0, "type": "n", "in": 1600, "out": 20, "runs": [[1, 3]]}]),
        ),
        (
            "agents",
            session(requests=[{"t": 0.0, "type": "n", "in": 0, "out": 20, "runs": [[1, 3]]}]),
        ),
        (
            "agents",
            session(requests=[{"t": 0.0, "type": "n", "in": 640, "out": 20, "runs": [[-9, 20]]}]),
        ),
        ("agents", session(block_size=0)),
        ("agents", session(tool_tokens=10**12)),
        ("agents", b'{"id": 3}'),
        ("bailian", chat(1, -1, 1)),
        ("bailian", b"[]"),
        ("sharegpt", tokens()),
        ("access", b'{"time": "yesterday"}'),
        ("access", b'{"time": 1, "status": 200, "tenant": "\xff"}'),
        pytest.param(
            "access",
            b'{"time": 1, "status": 200, "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}",
            id="nested",
        ),
        ("access", logged(1.0, -5)),
        ("access", logged(1.0, 5, blocks=[4], block_tokens=0)),
        ("access", logged(1.0, 5, blocks=[-4])),
        ("bailian", chat(1, -1, 1, 1 << 48)),
        ("mooncake", b"{"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(kind: str, bad: bytes) -> None:
    good = {
        "azure": AZURE.splitlines()[1],
        "agents": session(),
        "bailian": chat(1, -1, 1, 5),
        "sharegpt": tokens(1),
    }
    lines = [good.get(kind, b""), bad]
    with pytest.raises(TraceError, match=r"^t\.jsonl:2: "):
        list(READERS[kind](lines, "t.jsonl"))


def test_a_run_of_blocks_is_read_no_further_than_its_prompt_reaches() -> None:
    (request,) = agents(
        [
            session(
                requests=[
                    {"t": 0.0, "type": "n", "in": 1600, "out": 2, "runs": [[0, (1 << 31) - 1]]}
                ]
            )
        ]
    )
    assert len(request.blocks) == 3


@pytest.mark.parametrize("spoilt", [slice(0, 40), slice(10, None)], ids=["cut", "no-gzip"])
def test_a_packed_file_that_is_not_whole_is_named(tmp_path: Path, spoilt: slice) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(AZURE * 50)[spoilt])
    with pytest.raises(TraceError, match=r"trace\.gz: "):
        read_trace(path)


def test_a_packed_file_whose_bytes_are_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(AZURE)[:12] + b"\xff" * 50)
    with pytest.raises(TraceError, match=r"trace\.gz: "):
        read_trace(path)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.traces.trace_lines.MOST_LINE_BYTES", 1 << 20)
    path = tmp_path / "trace"
    path.write_bytes(AZURE + b"9" * (2 << 20))
    with pytest.raises(
        TraceError, match="trace:5: the line is too long; it must be shorter than 1 MiB"
    ):
        read_trace(path, "azure")


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b'{"a": 1}\n', b'{"hash_ids": "\xff"}\n', b'{"\xff": 1}\n']
)
def test_a_file_in_no_known_format_is_refused_at_its_first_line(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="trace:1: "):
        read_trace(path)


@pytest.mark.parametrize("size", [16, 64, 128, 512, 1024])
def test_blocks_of_any_size_share_exactly_the_blocks_below_the_common_prefix(size: int) -> None:
    shared, mine, yours = range(16), range(100, 116), range(200, 216)
    request = TraceRequest(0.0, 4096, 1, (*shared, *mine), 128)
    two = TraceRequest(0.0, 4096, 1, (*shared, *yours), 128)
    keys, others = keys_of(request, size), keys_of(two, size)
    assert len(keys) == len(others) == 4096 // size
    assert [a == b for a, b in zip(keys, others, strict=True)] == [
        place < 2048 // size for place in range(4096 // size)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("recorded", "size"), [(100, 512), (24, 16), (16, 24), (512, 100), (640, 512), (7, 5)]
)
def test_blocks_of_sizes_that_do_not_divide_each_other_never_claim_more_than_was_shared(
    recorded: int, size: int
) -> None:
    blocks = -(-4096 // recorded)
    shared = min(20, blocks // 2)
    request = TraceRequest(0.0, 4096, 1, tuple(range(blocks)), recorded)
    two = TraceRequest(
        0.0, 4096, 1, (*range(shared), *range(9000, 9000 + blocks - shared)), recorded
    )
    keys, others = keys_of(request, size), keys_of(two, size)
    assert len(keys) == len(others) == 4096 // size
    assert len(set(keys)) == len(keys)
    equal = [a == b for a, b in zip(keys, others, strict=True)]
    assert equal == [(place + 1) * size <= shared * recorded for place in range(4096 // size)]


def test_blocks_cut_smaller_keep_64_bit_ids_apart() -> None:
    high = [((1 << 56) * copy) + 5 for copy in range(256)]
    keys = [key for item in high for key in keys_of(TraceRequest(0.0, 512, 1, (item,)), 16)]
    assert len(set(keys)) == len(keys) == 256 * 32
    assert max(keys) < 1 << 64
