"""What an attacker sends, as bare bytes, to a real gateway before a recording engine: nothing of it is forwarded.

Each row of the table is one attack (faults.md 4 and A01-A10): the right status, OpenAI's error body, no traceback, and
a gateway that goes on serving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.attacks import (
    ATTACKS,
    BODY,
    CHAT,
    FRAMING_ATTACKS,
    IN_CHUNKS,
    LENGTH,
    PATH,
    Attack,
    chat,
    chunked,
    head,
    raw,
)
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.raw_connection import Answer, RawConnection, post
from tests.e2e.recording_engine import MODEL, TEXT, RecordingEngine, recording_engine
from tests.fair_time import Stopwatch, pace

CONFIG = """
models: [{{name: demo, aliases: [alias], pool: main, context_tokens: 4096}}]
pools:
  main: {{policy: round_robin, endpoints: [{{url: '{url}', api_key: '${{ENGINE_KEY}}'}}]}}
"""
ENGINE_KEY = "the-engines-own-key"
INTERNAL: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
    "ec_transfer_params": {},
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 2,
    "bootstrap_pair_key": "k",
    "disaggregated_params": {"request_type": "context_only"},
    "disagg_request_id": 3,
    "routed_dp_rank": 9,
    "data_parallel_rank": 9,
    "disagg_prefill_dp_rank": 9,
    "priority": -100,
    "cache_salt": "of another tenant",
    "extra_key": "of another tenant",
    "rid": "of another request",
    "request_id": "of another request",
}


class Line(NamedTuple):
    gateway: GatewayProcess
    stub: RecordingEngine


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A gateway before the recording engine. In the end it is alive and has never printed a traceback."""
    with recording_engine() as stub:
        config = CONFIG.format(url=stub.url)
        with gateway_process(tmp_path_factory.mktemp("attacks"), config, ENGINE_KEY=ENGINE_KEY) as running:
            yield Line(running, stub)
            assert running.is_alive
            assert "Traceback" not in running.stderr_text, running.stderr_text


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_is_answered_with_its_error_and_nothing_is_forwarded(
    line: Line, attack: Attack
) -> None:
    sent = attack.sent if isinstance(attack.sent, bytes) else attack.sent()
    forwarded = len(line.stub.requests)
    took = Stopwatch(line.gateway.pid)
    # Each attack has its own address, which would have to pause after a slow large body.
    answer = ask(line, sent, f"127.0.1.{ATTACKS.index(attack) % 250 + 1}")
    fair_s = took.fair_s
    error = answer.error
    assert answer.status == attack.status, error
    assert error["code"] == attack.code
    assert attack.param is None or error["param"] == attack.param
    assert attack.says in error["message"]
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-should-retry"] == "false"
    assert "x-evil" not in answer.headers
    assert "aiohttp" not in answer.headers.get("server", "")
    assert len(answer.body) < 1000
    assert fair_s < 1.5 * pace()
    assert len(line.stub.requests) == forwarded
    assert line.gateway.is_alive
    assert "Traceback" not in line.gateway.stderr_text


@pytest.mark.parametrize("attack", FRAMING_ATTACKS, ids=[attack.name for attack in FRAMING_ATTACKS])
def test_an_attack_behind_an_ordinary_request_fares_as_if_it_had_come_alone(
    line: Line, attack: Attack
) -> None:
    """The first is served without aiohttp's parser, the second judged by it: neither sees a byte of the other's."""
    assert isinstance(attack.sent, bytes)
    forwarded = len(line.stub.requests)
    with RawConnection(line.gateway.port) as wire:
        wire.send(chat() + attack.sent)
        assert wire.answer().status == 200
        answer = wire.answer()
    assert (answer.status, answer.error["code"]) == (attack.status, attack.code)
    assert len(line.stub.requests) == forwarded + 1
    assert line.stub.requests[-1].json == CHAT


def ask(line: Line, sent: bytes, address: str = "") -> Answer:
    with RawConnection(line.gateway.port, address=address) as wire:
        wire.send(sent)
        return wire.answer()


def test_an_engine_sees_a_request_of_the_gateways_own_making(line: Line) -> None:
    spoofed = (
        "Authorization: Bearer the-clients-key",
        "X-Request-Id: mine",
        "Cookie: a=b",
        "X-Data-Parallel-Rank: 3",
    )
    hop = (
        "Connection: X-Secret",
        "X-Secret: a",
        "X-Vllm-Priority: -1",
        "Forwarded: for=x",
        f"traceparent: 00-{'ab' * 16}-{'cd' * 8}-01",
    )
    assert ask(line, post(BODY, PATH, *spoofed, *hop)).status == 200
    seen = line.stub.requests[-1]
    assert seen.line == f"POST {PATH} HTTP/1.1"
    assert set(seen.headers) == {
        "host",
        "content-type",
        "content-length",
        "accept",
        "accept-encoding",
        "user-agent",
        "authorization",
        "x-request-id",
        "traceparent",
    }
    assert seen.headers["authorization"] == f"Bearer {ENGINE_KEY}"
    assert seen.headers["host"] == line.stub.url.removeprefix("http://")
    assert seen.headers["x-request-id"].startswith("req_")
    assert seen.body == BODY


def test_members_that_steer_engines_are_dropped_also_where_they_hide(line: Line) -> None:
    hidden = {"vllm_xargs": {"mine": 1, **INTERNAL}, "top_k": 3, "unknown": {"kept": [1.0, None]}}
    assert ask(line, chat(**INTERNAL, **hidden)).status == 200
    seen = line.stub.requests[-1].json
    assert re.fullmatch("[0-9a-f]{64}", seen.pop("cache_salt")), (
        "the gateway's own, not the client's"
    )
    assert seen == {
        **CHAT,
        "vllm_xargs": {"mine": 1},
        "top_k": 3,
        "unknown": {"kept": [1.0, None]},
    }


def test_an_escaped_name_of_a_dropped_member_is_dropped_as_well(line: Line) -> None:
    sent = rb'{"model":"demo","kv_transf\u0065r_params":{"a":1},"messages":[],"vllm_xargs":{"r\u0069d":"x"}}'
    assert ask(line, raw(sent)).status == 200
    assert line.stub.requests[-1].json == {"model": "demo", "messages": [], "vllm_xargs": {}}


@pytest.mark.parametrize(
    "host",
    [
        "a/v1/x?y=",
        "evil.example",
        "test:99999999",
        "[::1",
        "a@b",
        "#",
        "..",
        "a b",
        "%00",
        "127.0.0.1/v1/models#",
        "é",
    ],
)
def test_a_host_that_means_to_confuse_changes_nothing(line: Line, host: str) -> None:
    """Paths and upstream hosts never come from Host (faults.md 4, BadHost): either refused, or served as ever."""
    answer = ask(line, head(LENGTH, host=f"Host: {host}") + BODY)
    if answer.status == 200:
        seen = line.stub.requests[-1]
        assert (seen.line, seen.headers["host"]) == (
            f"POST {PATH} HTTP/1.1",
            line.stub.url.removeprefix("http://"),
        )
    else:
        assert answer.status == 400
        assert answer.error
    listed = ask(line, head(start="GET /v1/models HTTP/1.1", host=f"Host: {host}"))
    assert listed.status in (200, 400)
    unknown = ask(line, head(start="GET /admin HTTP/1.1", host=f"Host: {host}"))
    assert unknown.status in (404, 400)
    assert unknown.error


@pytest.mark.parametrize(
    "start", [f"POST {PATH}?api-version=1 HTTP/1.1", f"POST http://evil.example{PATH} HTTP/1.1"]
)
def test_a_query_or_an_absolute_uri_finds_its_path_and_goes_no_further(
    line: Line, start: str
) -> None:
    assert ask(line, head(LENGTH, start=start) + BODY).status == 200
    assert line.stub.requests[-1].line == f"POST {PATH} HTTP/1.1"


def test_expect_100_continue_is_honoured_before_the_body(line: Line) -> None:
    with RawConnection(line.gateway.port) as wire:
        wire.send(head("Expect: 100-continue", LENGTH))
        assert wire.answer().status == 100
        wire.send(BODY)
        assert wire.answer().status == 200


def test_pipelined_requests_are_answered_in_their_order(line: Line) -> None:
    with RawConnection(line.gateway.port) as wire:
        wire.send(
            chat(user="status:418")
            + chat()
            + head(start="GET /v1/models HTTP/1.1")
            + chat(model="nope")
            + chat(stream=True)
        )
        answers = [wire.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [418, 200, 200, 404, 200]
    assert answers[4].body.endswith(b"data: [DONE]\n\n")


def test_a_refusal_on_the_line_comes_before_the_ordinary_answer_pipelined_behind_it(
    line: Line,
) -> None:
    with RawConnection(line.gateway.port) as wire:
        wire.send(
            chat(model="nope")
            + head(start="GET /v1/models HTTP/1.1")
            + chat(n=0)
            + head(start="GET /x HTTP/1.1")
        )
        assert [wire.answer().status for _ in range(4)] == [404, 200, 400, 404]


def test_what_follows_a_refused_body_is_not_taken_for_a_request(line: Line) -> None:
    forwarded = len(line.stub.requests)
    with RawConnection(line.gateway.port) as wire:
        wire.send(head("Content-Length: 1000000000") + chat())
        assert wire.answer().status == 413
        assert wire.is_closed()
    assert len(line.stub.requests) == forwarded


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_client_gets_a_bare_body_and_a_close(line: Line, stream: bool) -> None:
    with RawConnection(line.gateway.port) as wire:
        wire.send(post({**CHAT, "stream": stream}, version="1.0"))
        answer = wire.answer()
        assert wire.is_closed()
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers
    assert (b"data: [DONE]\n\n" in answer.body) if stream else (TEXT.encode() in answer.body)


def test_chunked_bodies_of_every_size_arrive_whole_and_with_a_length(line: Line) -> None:
    for size in (1, 7, len(BODY)):
        pieces = [BODY[at : at + size] for at in range(0, len(BODY), size)]
        framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        assert ask(line, chunked(framed + b"0\r\nX-Trailer: a\r\n\r\n")).status == 200
        seen = line.stub.requests[-1]
        assert seen.body == BODY
        assert "transfer-encoding" not in seen.headers
        assert "x-trailer" not in seen.headers


@pytest.mark.parametrize("status", [400, 404, 409, 422, 460])
def test_an_engines_refusal_is_reshaped_and_not_retried(line: Line, status: int) -> None:
    forwarded = len(line.stub.requests)
    answer = ask(line, chat(user=f"status:{status}"))
    assert (answer.status, answer.error["message"], answer.error["code"]) == (
        status,
        "as asked",
        None,
    )
    assert answer.headers["x-should-retry"] == "false"
    assert len(line.stub.requests) == forwarded + 1


UPGRADES = ["Upgrade: h2c", "Upgrade: websocket", "Upgrade: TLS/1.0, h2c"]


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_is_ignored_and_the_request_is_answered_over_http_1_1(
    line: Line, upgrade: str
) -> None:
    """As Java's HttpClient asks for HTTP/2; its connection goes on."""
    asked = (
        "Connection: Upgrade, HTTP2-Settings",
        upgrade,
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA",
    )
    with RawConnection(line.gateway.port) as wire:
        wire.send(head(*asked, LENGTH) + BODY + chat(user="status:418"))
        assert wire.answer().status == 200
        assert line.stub.requests[0].headers.keys().isdisjoint(("upgrade", "http2-settings"))
        assert wire.answer().status == 418


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_of_an_unusual_request_is_ignored_and_its_connection_closed(
    line: Line, upgrade: str
) -> None:
    """aiohttp's parser drops what came behind such a head, so nothing may be read after it."""
    asked = ("Connection: Upgrade", upgrade)
    behind = chat(user="status:418")
    forwarded = len(line.stub.requests)
    for sent in (head(*asked, start="GET /v1/models HTTP/1.1"), chunked(IN_CHUNKS, *asked)):
        with RawConnection(line.gateway.port) as wire:
            wire.send(sent + behind)
            assert wire.answer().status == 200
            assert wire.is_closed()
    assert [each.json for each in line.stub.requests[forwarded:]] == [CHAT]


def test_a_stream_that_ends_properly_after_its_finish_reason_is_whole_and_gets_its_done(
    line: Line,
) -> None:
    for asked in (
        {"user": "undone:1"},
        {"user": "undone:3", "n": 3},
        {"user": "undone:1", "model": "alias"},
    ):
        answer = ask(line, chat(stream=True, **asked))
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in answer.body


def test_a_stream_that_ends_properly_before_all_its_finish_reasons_is_broken(line: Line) -> None:
    for asked in ({"user": "undone:0"}, {"user": "undone:2", "n": 3}):
        answer = ask(line, chat(stream=True, **asked))
        assert b"stream_interrupted" in answer.body
        assert b"[DONE]" not in answer.body


@pytest.mark.parametrize(("finished", "whole"), [(6, True), (5, False), (2, False)])
def test_a_stream_for_several_prompts_is_whole_when_each_choice_of_each_prompt_has_ended(
    line: Line, finished: int, whole: bool
) -> None:
    asked = {
        "model": MODEL,
        "prompt": ["a", "b", "c"],
        "n": 2,
        "stream": True,
        "user": f"undone:{finished}",
    }
    answer = ask(line, post(asked, "/v1/completions"))
    assert answer.body.endswith(b"data: [DONE]\n\n") == whole
    assert (b"stream_interrupted" in answer.body) != whole


def test_a_client_that_closes_its_sending_side_has_left(line: Line) -> None:
    """A FIN is all that a closed client sends; waiting to see whether it still reads would keep the engine busy."""
    with RawConnection(line.gateway.port) as wire:
        wire.send(chat(user="hold"))
        assert line.stub.wait(lambda: line.stub.requests[-1].json.get("user") == "hold")
        wire.socket.shutdown(1)
        assert wire.is_closed()
    seen = line.stub.requests[-1]
    assert line.stub.wait(lambda: seen.closed_at is not None)


def test_the_gateway_serves_on_after_all_of_it(line: Line) -> None:
    answer = ask(line, chat())
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == TEXT
    assert line.gateway.resident_bytes < 300 * 2**20
