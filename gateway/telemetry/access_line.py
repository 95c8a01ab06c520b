"""One line of the access log: its fields, and how they are computed from an ended request."""

from __future__ import annotations

import msgspec

from gateway.protocol.request.api_call import Call
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange, SplitRecord

Microseconds = int | None
StageTimes = tuple[
    Microseconds,
    Microseconds,
    Microseconds,
    Microseconds,
    Microseconds,
    Microseconds,
    Microseconds,
    Microseconds,
]
"""The fields `received_us` to `last_us` of an access log line."""


NO_BLOCKS = msgspec.Raw(b"[]")


class AccessLine(msgspec.Struct, omit_defaults=True):
    """One line of the access log. Times in us are microseconds since the request's head was parsed.

    slo                the request's service class, which sets its latency targets
    slo_outcome        whether the latency targets were met, or which one was missed
    predicted_ttft_us  predicted time to first token, counted from the pick of an endpoint
    requested_model    the requested model, if another one served the request
    blocks             JSON list of chained ids of the prompt's 2 KiB blocks; see `access_blocks`
    resumes            number of times that the stream was continued on another endpoint
    hedge_loser        the endpoint whose parallel attempt was cancelled
    client_request_id  the id that the client itself gave the request
    session            how its session was found: a header, a member of the body, or `prefix`
    session_id         keyed 48-bit id of its session; see `access_blocks`
    """

    time: float
    id: str
    client: str
    api: str
    status: int
    outcome: str
    done_us: int
    model: str = ""
    endpoint: str = ""
    received_us: int | None = None
    parsed_us: int | None = None
    admitted_us: int | None = None
    picked_us: int | None = None
    sent_us: int | None = None
    first_byte_us: int | None = None
    first_token_us: int | None = None
    last_us: int | None = None
    body_bytes: int = 0
    bytes_out: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    believed_cached_tokens: int | None = None
    finish_reason: str | None = None
    pick_reason: str | None = None
    pick_score: float | None = None
    candidates: int | None = None
    slo: str = ""
    slo_outcome: str = ""
    reason: str | None = None
    tenant: str = ""
    stream: bool = False
    events: int = 0
    retries: list[str] = []
    predicted_ttft_us: int | None = None
    split_reason: str = ""
    prefill: str = ""
    dialect: str = ""
    transport: str | None = None
    prefilled_us: int | None = None
    decode_sent_us: int | None = None
    handoff_us: int | None = None
    pulled_from: str = ""
    pulled_tokens: int = 0
    requested_model: str = ""
    proxy_request_id: str = ""
    blocks: msgspec.Raw = NO_BLOCKS
    trace_id: str = ""
    resumes: int = 0
    hedge_loser: str = ""
    session: str = ""
    client_request_id: str = ""
    session_id: int = 0


def access_line(
    exchange: Exchange, relay: Relay, usage: TokenUsage, now: float, unix_offset: float
) -> AccessLine:
    """Return the access log line of a request that ended at the monotonic time `now`.

    `unix_offset` converts that to Unix time.
    """
    # Keyword arguments would take twice as long. So would more than 30 positional arguments,
    # because CPython copies them to a list and a tuple first.
    start, call, pick = exchange.accepted_at, exchange.call, exchange.pick
    received_us, parsed_us, admitted_us, picked_us, sent_us, first_us, token_us, last_us = (
        _stage_times(exchange, relay)
    )
    line = AccessLine(
        unix_offset + start,
        exchange.id,
        exchange.client,
        exchange.api.path,
        exchange.status,
        exchange.outcome,
        ((now - start) * 1e6).__trunc__(),
        exchange.model,
        "" if pick is None else pick.candidate.endpoint.name,
        received_us,
        parsed_us,
        admitted_us,
        picked_us,
        sent_us,
        first_us,
        token_us,
        last_us,
        exchange.body_bytes,
        relay.bytes_sent,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        None if pick is None else pick.cached_tokens,
        relay.finish_reason,
        None if pick is None else pick.reason,
        None if pick is None else pick.score,
        None if pick is None else pick.candidate_count,
        "" if call is None else call.request.slo.name,
        exchange.slo_outcome,
    )
    _fill_optional_fields(line, exchange, relay)
    return line


def _stage_times(exchange: Exchange, relay: Relay) -> StageTimes:
    # Return the stages from `received_us` to `last_us` of an access log line.
    #
    # Stages without a wait between them share one time object, which is converted once. Compiled,
    # `seconds` is a machine number.
    start, received, parsed = exchange.accepted_at, exchange.received_at, exchange.parsed_at
    picked, sent, first = exchange.picked_at, exchange.sent_at, relay.first_byte_at
    if received is None or parsed is None or picked is None or sent is None or first is None:
        return _times_of_reached_stages(exchange, relay)
    seconds: float = received - start
    received_us = int(seconds * 1e6)
    seconds = parsed - start
    parsed_us = int(seconds * 1e6)
    seconds = picked - start
    picked_us = int(seconds * 1e6)
    seconds = sent - start
    sent_us = int(seconds * 1e6)
    seconds = first - start
    first_us = int(seconds * 1e6)
    admitted, token, last = exchange.admitted_at, relay.first_token_at, relay.last_data_at
    return (
        received_us,
        parsed_us,
        parsed_us if admitted is parsed else _microseconds(admitted, start),
        picked_us,
        sent_us,
        first_us,
        first_us if token is first else _microseconds(token, start),
        first_us if last is first else _microseconds(last, start),
    )


def _times_of_reached_stages(exchange: Exchange, relay: Relay) -> StageTimes:
    # Do the same for a request that did not reach every stage.
    start = exchange.accepted_at
    return (
        _microseconds(exchange.received_at, start),
        _microseconds(exchange.parsed_at, start),
        _microseconds(exchange.admitted_at, start),
        _microseconds(exchange.picked_at, start),
        _microseconds(exchange.sent_at, start),
        _microseconds(relay.first_byte_at, start),
        _microseconds(relay.first_token_at, start),
        _microseconds(relay.last_data_at, start),
    )


def _microseconds(stamp: float | None, start: float) -> int | None:
    # Return the time from `start` to `stamp` in microseconds.
    return None if stamp is None else int((stamp - start) * 1e6)


def _fill_optional_fields(line: AccessLine, exchange: Exchange, relay: Relay) -> None:
    # Set those fields of an access log line that do not apply to every request.
    if exchange.reason is not None:
        line.reason = exchange.reason
    if exchange.tenant:
        line.tenant = exchange.tenant
    if relay.event_count:
        line.events = relay.event_count
    if exchange.retries:
        line.retries = exchange.retries
    _fill_ids(line, exchange)
    if exchange.call is not None:
        _fill_call_fields(line, exchange, exchange.call)
    if exchange.predicted_ttft_s is not None:
        line.predicted_ttft_us = int(exchange.predicted_ttft_s * 1e6)
    if exchange.ledger is not None:
        line.resumes = exchange.ledger.resumes
    if exchange.hedge is not None:
        line.hedge_loser = exchange.hedge.loser
    if exchange.split is not None:
        _fill_split_fields(line, exchange.split, relay, exchange.accepted_at)


def _fill_ids(line: AccessLine, exchange: Exchange) -> None:
    if exchange.client_request_id and exchange.client_request_id != exchange.proxy_request_id:
        line.client_request_id = exchange.client_request_id
    if exchange.proxy_request_id:
        line.proxy_request_id = exchange.proxy_request_id
    if exchange.trace is not None:
        line.trace_id = exchange.trace.trace_id


def _fill_call_fields(line: AccessLine, exchange: Exchange, call: Call) -> None:
    if call.request.stream:
        line.stream = True
    if call.request.session:
        line.session = call.request.session_source
    if exchange.tier:
        line.requested_model = call.requested_model


def _fill_split_fields(line: AccessLine, split: SplitRecord, relay: Relay, start: float) -> None:
    line.split_reason, line.prefill = split.reason, split.prefill
    line.dialect, line.transport = split.dialect, split.transport
    line.pulled_from, line.pulled_tokens = split.pulled_from, split.pulled_tokens
    prefilled, handed_over = split.prefilled_at, split.handed_over_at
    line.prefilled_us = _microseconds(prefilled, start)
    line.decode_sent_us = _microseconds(handed_over, start)
    first_token = relay.first_token_at
    if first_token is not None and prefilled is not None:
        line.handoff_us = int(max(0.0, first_token - prefilled) * 1e6)
