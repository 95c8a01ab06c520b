"""Tests of how an attempt at one batch request ends: with a result, or with another attempt."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.batch.answer_receiver import LineClient
from gateway.batch.input_lines import InputLine
from gateway.batch.request_attempt import MANY_TOKENS, MAX_FAILURES, RequestAttempt, retry_delay_s
from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import Api
from gateway.protocol.errors import Failure, GatewayError

URL = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def run_of(
    failures: int = 0, kept: KeptAnswer | None = None, **members: Any
) -> tuple[RequestAttempt, LineClient]:
    clients: list[LineClient] = []

    async def nothing() -> None:
        """Serve nothing: the test itself writes the response."""

    def serve(_: str, client: LineClient, __: Api) -> tuple[Any, Coroutine[Any, Any, None]]:
        clients.append(client)
        record = {"id": "req_1", "outcome": "served", "ledger": None, "sent_at": None}
        return SimpleNamespace(**record, relay=None), nothing()

    line = InputLine("a", URL, msgspec.Raw(json.dumps(BODY | members).encode()))
    run = RequestAttempt(serve, "", 0, line, {}, kept, failures)  # type: ignore[arg-type]
    run.serving.close()
    return run, clients[0]


def test_a_whole_answer_is_the_result_as_it_came() -> None:
    run, client = run_of(n=2)
    client.write(HEAD + b'{"choices": []}')
    result = run.result()
    assert (result.status, result.body, result.is_retried) == (200, b'{"choices": []}', False)


def test_an_answer_that_breaks_is_tried_again_a_few_times() -> None:
    run, client = run_of(n=2)
    client.write(HEAD + b'{"cho')
    client.close_after_write()
    assert (run.result().status, run.result().is_retried) == (502, True)
    run, client = run_of(MAX_FAILURES - 1, n=2)
    client.write(HEAD + b'{"cho')
    client.close_after_write()
    assert (run.result().status, run.result().is_retried) == (502, False)


def test_a_stream_without_its_finish_reason_is_no_result() -> None:
    run, client = run_of()
    client.write(HEAD + b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
    assert run.result().is_retried


@pytest.mark.parametrize(
    ("failure", "is_retried", "is_unlimited"),
    [
        (Failure.BAD_REQUEST, False, False),
        (Failure.MODEL_NOT_FOUND, False, False),
        (Failure.SHED, True, True),
        (Failure.TENANT_RATE_LIMITED, True, True),
        (Failure.NO_CAPACITY, True, True),
        (Failure.UPSTREAM_FAILED, True, False),
        (Failure.UPSTREAM_TIMEOUT, True, False),
    ],
)
def test_refusals_for_lack_of_capacity_are_tried_again_without_limit(
    failure: Failure, is_retried: bool, is_unlimited: bool
) -> None:
    run, client = run_of(n=2)
    client.send_error(GatewayError(failure, "no", retry_after_s=2.0), "req_1")
    result = run.result()
    assert (result.is_retried, result.is_unlimited) == (is_retried, is_unlimited)
    assert result.retry_after_s == 2.0
    last, client = run_of(MAX_FAILURES, n=2)
    client.send_error(GatewayError(failure, "no"), "req_1")
    assert last.result().is_retried is (is_retried and is_unlimited)


def test_what_a_preemption_loses_depends_on_what_was_sent_and_can_be_continued() -> None:
    whole, _ = run_of(n=2)
    assert whole.lost_tokens == 0
    whole.exchange.sent_at = 1.0
    assert whole.lost_tokens == MANY_TOKENS
    streamed, _ = run_of()
    streamed.exchange.sent_at = 1.0
    exchange: Any = streamed.exchange
    exchange.relay = SimpleNamespace(event_count=9, first_token_at=1.5)
    assert (streamed.lost_tokens, streamed.ttft_s(3.0)) == (9, 0.5)
    exchange.ledger = SimpleNamespace(current_obstacle="", shown_ids=[1, 2], is_complete=False)
    assert (streamed.lost_tokens, streamed.shown_tokens) == (0, 2)


FIRST = msgspec.Raw(b'{"id":"c-1","created":7,"model":"m"}')


def test_an_answer_that_is_kept_up_to_its_limit_is_complete_without_an_engine() -> None:
    kept = KeptAnswer([1, 2], [3, 4, 5], "one two three", FIRST, 2)
    run, _ = run_of(kept=kept, max_tokens=3)
    assert run.is_complete
    result = run.result()
    body = json.loads(result.body)
    assert (result.status, result.is_retried) == (200, False)
    assert body["choices"][0]["message"]["content"] == "one two three"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    for most in ({"max_tokens": 4}, {}):
        assert not run_of(kept=kept, **most)[0].is_complete


def test_nothing_is_kept_beyond_the_finish_reason() -> None:
    run, client = run_of()
    client.write(HEAD + b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
    state = {"current_obstacle": "", "prompt_ids": [1], "shown_ids": [2], "prompt_tokens": 1}
    exchange: Any = run.exchange
    exchange.ledger = SimpleNamespace(**state, finish_reason=None)
    assert run.keep() is not None
    exchange.ledger.finish_reason = "stop"
    assert run.keep() is None


def test_an_answer_that_is_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batch.answer_receiver.MAX_ANSWER_BYTES", 100)
    run, client = run_of(n=2)
    client.write(HEAD + b"x" * 101)
    assert (run.result().status, run.result().is_retried) == (502, False)
    assert len(client.body) <= 100


def test_the_named_time_counts_and_other_delays_grow() -> None:
    assert retry_delay_s(1, 7.0) == 7.0
    assert retry_delay_s(1, 1e9) == 60.0
    delays = [retry_delay_s(attempts, None) for attempts in range(20)]
    assert delays == sorted(delays)
    assert delays[-1] == 30.0
