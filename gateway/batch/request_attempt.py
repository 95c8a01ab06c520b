"""One attempt at one batch request, from its line of the input file to its result.

This module prepares the request and reads the answer. gateway/serve_request.py serves the request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.batch.answer_receiver import LineClient, StreamedAnswer
from gateway.batch.engine_request_body import rest_body, streamed_body, whole_body
from gateway.batch.input_lines import BATCH_APIS, InputLine
from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import COMPLETIONS, Api
from gateway.protocol.errors import GatewayError, error_body
from gateway.protocol.response.date_header import ResponseClock

if TYPE_CHECKING:
    from gateway.request_record import Exchange

ServeLine = Callable[[str, LineClient, Api], "tuple[Exchange, Coroutine[Any, Any, None]]"]
"""A function that serves one request of a batch.

It takes the request's tenant, client and API, and returns the request's record and the coroutine
that serves it.
"""

RETRIED_STATUSES = frozenset((408, 429, 500, 502, 503, 504))
UNLIMITED_STATUSES = frozenset((429, 503))
"""HTTP statuses that are not caused by the request; it is tried again until its batch ends."""
MANY_TOKENS = 1 << 30
MAX_FAILURES = 5  # number of attempts with any other status above, after which a request has failed


class LineResult(msgspec.Struct, frozen=True):
    """The result of one attempt at a batch request.

    status, request_id, body  the response; the body is JSON
    is_retried                whether another attempt follows
    retry_after_s             seconds before the next attempt, if the gateway named a time; else
                              None
    """

    status: int
    request_id: str
    body: bytes
    is_retried: bool = False
    retry_after_s: float | None = None

    @property
    def is_unlimited(self) -> bool:
        """Return whether the request may be retried without limit, as after a 429 or 503."""
        return self.status in UNLIMITED_STATUSES


class RequestAttempt:
    """One attempt at one batch request.

    number      the request's index in the input file
    exchange    the gateway's record of the attempt
    serving     the coroutine that serves the request
    failures    number of earlier attempts that failed at engines
    started_at  monotonic time at which the runner started the attempt
    """

    def __init__(
        self,
        serve: ServeLine,
        tenant: str,
        number: int,
        line: InputLine,
        headers: Mapping[str, str],
        kept: KeptAnswer | None = None,
        failures: int = 0,
        started_at: float = 0.0,
    ) -> None:
        # Prepare an attempt; `kept` is the part of the answer that earlier attempts received.
        self.number, self.line, self.failures = number, line, failures
        self.started_at = started_at
        api, body = BATCH_APIS[line.url], bytes(line.body)
        streamed = streamed_body(body, api)
        self.kept = kept if streamed is not None else None
        answer = None
        if streamed is None:
            body = whole_body(body, api)
        else:
            body, terms = streamed
            answer = StreamedAnswer(api, self.kept)
            if self.kept is not None:
                model = msgspec.json.decode(line.body)["model"]
                api, body = COMPLETIONS, rest_body(terms, self.kept, model)
                if terms.max_tokens is not None and len(self.kept.tokens) >= terms.max_tokens:
                    answer.end_at_limit()
        self._client = LineClient(body, headers, ResponseClock(), answer)
        self.exchange, self.serving = serve(tenant, self._client, api)
        self.is_preempted = False

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is complete, so that no further attempt is needed."""
        answer = self._client.answer
        return answer is not None and answer.is_complete

    @property
    def lost_tokens(self) -> int:
        """Return how many generated tokens would be lost if this attempt were interrupted.

        The number is 0 if the request was not sent, or if its answer can be continued. It is
        MANY_TOKENS for an answer that is not streamed, whose length so far is unknown.
        """
        ledger = self.exchange.ledger
        if self.exchange.sent_at is None or (ledger is not None and not ledger.current_obstacle):
            return 0
        return MANY_TOKENS if self._client.answer is None else self.new_tokens

    @property
    def shown_tokens(self) -> int:
        """Return how many token ids are recorded for a continuation; 0 if they are not recorded."""
        ledger = self.exchange.ledger
        return 0 if ledger is None else len(ledger.shown_ids)

    @property
    def is_queued(self) -> bool:
        return self.exchange.parsed_at is not None and self.exchange.admitted_at is None

    @property
    def is_ending(self) -> bool:
        """Return whether only the last events of the answer are missing.

        Then interrupting the request would free no capacity.
        """
        ledger = self.exchange.ledger
        return ledger is not None and ledger.is_complete

    def preempt(self) -> None:
        """Mark this attempt as interrupted in favour of live traffic.

        Call this before cancelling the attempt's task.
        """
        self.is_preempted = True
        self.exchange.set_preempted()

    def keep(self) -> KeptAnswer | None:
        """Return the part of the answer that another attempt can continue if this one is cancelled.

        With None, the next attempt generates the answer from the beginning. What this attempt has
        received is left out if it cannot be continued exactly, or has its finish reason already:
        another engine would generate text beyond the end.
        """
        ledger, answer = self.exchange.ledger, self._client.answer
        if ledger is None or answer is None or ledger.current_obstacle:
            return self.kept
        if ledger.finish_reason is not None:
            return self.kept
        return answer.keep(ledger.prompt_ids, ledger.shown_ids, ledger.prompt_tokens)

    @property
    def new_tokens(self) -> int:
        """Return how many tokens this attempt has received, estimated as one per event."""
        relay = self.exchange.relay
        return 0 if relay is None else relay.event_count

    def ttft_s(self, now: float) -> float | None:
        """Return the seconds from sending the request to its first token, or to `now` without one.

        Returns None if the request was not sent, or if its answer is not streamed.
        """
        relay, sent_at = self.exchange.relay, self.exchange.sent_at
        if relay is None or sent_at is None or self._client.answer is None:
            return None
        return (relay.first_token_at or now) - sent_at

    def refused(self, error: GatewayError) -> LineResult:
        """Return the result of a batch request that the gateway itself refused with `error`.

        No engine has received the request.
        """
        self.serving.close()
        return LineResult(error.status, self.exchange.id, error_body(error))

    def result(self) -> LineResult:
        """Return the result of the attempt.

        Call this after the attempt's coroutine has ended.
        """
        client, request_id = self._client, self.exchange.id
        if not client.status and client.answer is not None and client.answer.is_complete:
            return LineResult(200, request_id, client.answer.body())
        status = client.status
        if client.overflow:
            return LineResult(502, request_id, _problem("The answer is too long for a batch."))
        if status == 200 and self.exchange.outcome == "served" and not client.is_cut:
            if client.answer is None:
                return LineResult(200, request_id, client.body)
            if client.answer.is_complete:
                return LineResult(200, request_id, client.answer.body())
        if status == 200 or not status:  # the answer broke before its end
            status = 502
        body = client.body or _problem("The engine's answer broke.")
        is_retried = status in UNLIMITED_STATUSES or (
            status in RETRIED_STATUSES and self.failures + 1 < MAX_FAILURES
        )
        return LineResult(status, request_id, body, is_retried, client.retry_after_s)


def _problem(message: str) -> bytes:
    error = {"message": message, "type": "upstream_error", "param": None, "code": "upstream_failed"}
    return msgspec.json.encode({"error": error})


def retry_delay_s(attempts: int, retry_after_s: float | None) -> float:
    """Return the seconds to wait before the next attempt at a failed batch request.

    attempts       number of failed attempts so far
    retry_after_s  seconds in the Retry-After header of the refusal; None if it had none

    A Retry-After is limited to 0.1 to 60 s. Without one, the wait is 0.5 s at first and doubles
    with each attempt, up to 30 s.
    """
    if retry_after_s is not None:
        return min(60.0, max(0.1, retry_after_s))
    return min(30.0, 0.25 * 2.0 ** min(attempts, 8))
