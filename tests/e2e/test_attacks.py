"""Tests that a real gateway refuses malicious requests, and does not forward them.

The requests of attacks.py are sent as raw bytes. Each must get its status and an error body in
OpenAI's format. It must cause no traceback, and the gateway must keep serving.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.duration_limits import PATIENCE_S, Stopwatch, pace
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
from tests.metrics_page import total

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


class Setup(NamedTuple):
    gateway: GatewayProcess
    engine: RecordingEngine


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    # Run a gateway in front of the recording engine.
    #
    # At the end, assert that it printed no traceback.
    with recording_engine() as engine:
        config = CONFIG.format(url=engine.url)
        with gateway_process(
            tmp_path_factory.mktemp("attacks"), config, ENGINE_KEY=ENGINE_KEY
        ) as running:
            yield Setup(running, engine)
            assert running.is_alive
            assert "Traceback" not in running.stderr_text, running.stderr_text


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_is_answered_with_its_error_and_nothing_is_forwarded(
    setup: Setup, attack: Attack
) -> None:
    sent = attack.sent if isinstance(attack.sent, bytes) else attack.sent()
    forwarded = len(setup.engine.requests)
    took = Stopwatch(setup.gateway.pid)
    # Each attack has its own address, which would have to pause after a slow large body.
    answer = ask(setup, sent, f"127.0.1.{ATTACKS.index(attack) % 250 + 1}")
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
    assert len(setup.engine.requests) == forwarded
    assert setup.gateway.is_alive
    assert "Traceback" not in setup.gateway.stderr_text


@pytest.mark.parametrize("attack", FRAMING_ATTACKS, ids=[attack.name for attack in FRAMING_ATTACKS])
def test_an_attack_pipelined_behind_a_valid_request_is_refused(
    setup: Setup, attack: Attack
) -> None:
    # The gateway parses the first request itself, and the second with aiohttp.
    #
    # Neither parser may read bytes of the other's request.
    assert isinstance(attack.sent, bytes)
    forwarded = len(setup.engine.requests)
    with RawConnection(setup.gateway.port) as connection:
        connection.send(chat() + attack.sent)
        assert connection.answer().status == 200
        answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (attack.status, attack.code)
    assert len(setup.engine.requests) == forwarded + 1
    assert setup.engine.requests[-1].json == CHAT


def ask(setup: Setup, sent: bytes, address: str = "") -> Answer:
    with RawConnection(setup.gateway.port, address=address) as connection:
        connection.send(sent)
        return connection.answer()


def test_an_engine_gets_only_headers_and_members_that_the_gateway_allows(setup: Setup) -> None:
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
    assert ask(setup, post(BODY, PATH, *spoofed, *hop)).status == 200
    request = setup.engine.requests[-1]
    assert request.line == f"POST {PATH} HTTP/1.1"
    assert set(request.headers) == {
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
    assert request.headers["authorization"] == f"Bearer {ENGINE_KEY}"
    assert request.headers["host"] == setup.engine.url.removeprefix("http://")
    assert request.headers["x-request-id"].startswith("req_")
    assert request.body == BODY


def test_engine_internal_members_are_dropped_even_if_hidden(setup: Setup) -> None:
    hidden = {"vllm_xargs": {"mine": 1, **INTERNAL}, "top_k": 3, "unknown": {"kept": [1.0, None]}}
    assert ask(setup, chat(**INTERNAL, **hidden)).status == 200
    request = setup.engine.requests[-1].json
    assert re.fullmatch("[0-9a-f]{64}", request.pop("cache_salt")), (
        "the gateway's own, not the client's"
    )
    assert request == {
        **CHAT,
        "vllm_xargs": {"mine": 1},
        "top_k": 3,
        "unknown": {"kept": [1.0, None]},
    }


def test_a_dropped_member_with_an_escaped_name_is_dropped(setup: Setup) -> None:
    sent = rb'{"model":"demo","kv_transf\u0065r_params":{"a":1},"messages":[],"vllm_xargs":{"r\u0069d":"x"}}'
    assert ask(setup, raw(sent)).status == 200
    assert setup.engine.requests[-1].json == {"model": "demo", "messages": [], "vllm_xargs": {}}


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
def test_a_malicious_host_header_changes_nothing(setup: Setup, host: str) -> None:
    # Paths and upstream hosts never come from Host: the request is refused or served as usual.
    answer = ask(setup, head(LENGTH, host=f"Host: {host}") + BODY)
    if answer.status == 200:
        request = setup.engine.requests[-1]
        assert (request.line, request.headers["host"]) == (
            f"POST {PATH} HTTP/1.1",
            setup.engine.url.removeprefix("http://"),
        )
    else:
        assert answer.status == 400
        assert answer.error
    listed = ask(setup, head(start="GET /v1/models HTTP/1.1", host=f"Host: {host}"))
    assert listed.status in (200, 400)
    unknown = ask(setup, head(start="GET /admin HTTP/1.1", host=f"Host: {host}"))
    assert unknown.status in (404, 400)
    assert unknown.error


@pytest.mark.parametrize(
    "start", [f"POST {PATH}?api-version=1 HTTP/1.1", f"POST http://evil.example{PATH} HTTP/1.1"]
)
def test_a_query_or_an_absolute_uri_is_routed_by_its_path_and_not_forwarded(
    setup: Setup, start: str
) -> None:
    assert ask(setup, head(LENGTH, start=start) + BODY).status == 200
    assert setup.engine.requests[-1].line == f"POST {PATH} HTTP/1.1"


def test_expect_100_continue_is_honoured_before_the_body(setup: Setup) -> None:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(head("Expect: 100-continue", LENGTH))
        assert connection.answer().status == 100
        connection.send(BODY)
        assert connection.answer().status == 200


def test_pipelined_requests_are_answered_in_order(setup: Setup) -> None:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(
            chat(user="status:418")
            + chat()
            + head(start="GET /v1/models HTTP/1.1")
            + chat(model="nope")
            + chat(stream=True)
        )
        answers = [connection.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [418, 200, 200, 404, 200]
    assert answers[4].body.endswith(b"data: [DONE]\n\n")


def test_a_refusal_is_sent_before_the_response_to_the_next_pipelined_request(
    setup: Setup,
) -> None:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(
            chat(model="nope")
            + head(start="GET /v1/models HTTP/1.1")
            + chat(n=0)
            + head(start="GET /x HTTP/1.1")
        )
        assert [connection.answer().status for _ in range(4)] == [404, 200, 400, 404]


def test_bytes_after_a_refused_body_are_not_parsed_as_a_request(setup: Setup) -> None:
    forwarded = len(setup.engine.requests)
    with RawConnection(setup.gateway.port) as connection:
        connection.send(head("Content-Length: 1000000000") + chat())
        assert connection.answer().status == 413
        assert connection.is_closed()
    assert len(setup.engine.requests) == forwarded


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_client_gets_an_unchunked_body_and_a_close(setup: Setup, stream: bool) -> None:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(post({**CHAT, "stream": stream}, version="1.0"))
        answer = connection.answer()
        assert connection.is_closed()
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers
    assert (b"data: [DONE]\n\n" in answer.body) if stream else (TEXT.encode() in answer.body)


def test_chunked_bodies_of_every_size_are_forwarded_with_a_content_length(setup: Setup) -> None:
    for size in (1, 7, len(BODY)):
        pieces = [BODY[index : index + size] for index in range(0, len(BODY), size)]
        framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        assert ask(setup, chunked(framed + b"0\r\nX-Trailer: a\r\n\r\n")).status == 200
        request = setup.engine.requests[-1]
        assert request.body == BODY
        assert "transfer-encoding" not in request.headers
        assert "x-trailer" not in request.headers


@pytest.mark.parametrize("status", [400, 404, 409, 422, 460])
def test_an_engines_refusal_is_reshaped_and_not_retried(setup: Setup, status: int) -> None:
    forwarded = len(setup.engine.requests)
    answer = ask(setup, chat(user=f"status:{status}"))
    assert (answer.status, answer.error["message"], answer.error["code"]) == (
        status,
        "as asked",
        None,
    )
    assert answer.headers["x-should-retry"] == "false"
    assert len(setup.engine.requests) == forwarded + 1


UPGRADES = ["Upgrade: h2c", "Upgrade: websocket", "Upgrade: TLS/1.0, h2c"]


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_is_ignored_and_the_request_is_answered_over_http_1_1(
    setup: Setup, upgrade: str
) -> None:
    request = (
        "Connection: Upgrade, HTTP2-Settings",
        upgrade,
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA",
    )
    with RawConnection(setup.gateway.port) as connection:
        connection.send(head(*request, LENGTH) + BODY + chat(user="status:418"))
        assert connection.answer().status == 200
        assert setup.engine.requests[0].headers.keys().isdisjoint(("upgrade", "http2-settings"))
        assert connection.answer().status == 418


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_of_an_unusual_request_is_ignored_and_its_connection_closed(
    setup: Setup, upgrade: str
) -> None:
    # aiohttp's parser drops the bytes after such a head, so the gateway must not read further.
    request = ("Connection: Upgrade", upgrade)
    behind = chat(user="status:418")
    forwarded = len(setup.engine.requests)
    for sent in (head(*request, start="GET /v1/models HTTP/1.1"), chunked(IN_CHUNKS, *request)):
        with RawConnection(setup.gateway.port) as connection:
            connection.send(sent + behind)
            assert connection.answer().status == 200
            assert connection.is_closed()
    assert [request.json for request in setup.engine.requests[forwarded:]] == [CHAT]


def upstream_errors(setup: Setup) -> float:
    # Return the number of failures that count towards an ejection of the engine.
    with urllib.request.urlopen(f"{setup.gateway.admin_url}/metrics", timeout=PATIENCE_S) as page:
        return total(page.read().decode(), "penstock_upstream_errors_total")


def test_a_body_that_ends_after_its_finish_reason_is_complete_and_gets_done(
    setup: Setup,
) -> None:
    before = upstream_errors(setup)
    for item in (
        {"user": "undone:1"},
        {"user": "undone:3", "n": 3},
        {"user": "undone:1", "model": "alias"},
    ):
        answer = ask(setup, chat(stream=True, **item))
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in answer.body
    assert upstream_errors(setup) == before


def test_a_body_that_ends_before_all_finish_reasons_is_a_broken_stream(setup: Setup) -> None:
    before = upstream_errors(setup)
    for item in ({"user": "undone:0"}, {"user": "undone:2", "n": 3}):
        answer = ask(setup, chat(stream=True, **item))
        assert b"stream_interrupted" in answer.body
        assert b"[DONE]" not in answer.body
    assert upstream_errors(setup) == before + 2


@pytest.mark.parametrize(("finished", "whole"), [(6, True), (5, False), (2, False)])
def test_a_stream_for_several_prompts_is_complete_when_every_choice_has_ended(
    setup: Setup, finished: int, whole: bool
) -> None:
    request = {
        "model": MODEL,
        "prompt": ["a", "b", "c"],
        "n": 2,
        "stream": True,
        "user": f"undone:{finished}",
    }
    answer = ask(setup, post(request, "/v1/completions"))
    assert answer.body.endswith(b"data: [DONE]\n\n") == whole
    assert (b"stream_interrupted" in answer.body) != whole


def test_a_client_that_closes_its_sending_side_counts_as_disconnected(setup: Setup) -> None:
    # A client that exits sends only a FIN, like a client that closes only its sending side.
    #
    # Waiting to see whether the client still reads would keep the engine busy for nothing.
    with RawConnection(setup.gateway.port) as connection:
        connection.send(chat(user="hold"))
        assert setup.engine.wait(lambda: setup.engine.requests[-1].json.get("user") == "hold")
        connection.socket.shutdown(1)
        assert connection.is_closed()
    request = setup.engine.requests[-1]
    assert setup.engine.wait(lambda: request.closed_at is not None)


def test_the_gateway_still_serves_after_all_attacks(setup: Setup) -> None:
    answer = ask(setup, chat())
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == TEXT
    assert setup.gateway.resident_bytes < 300 * 2**20
