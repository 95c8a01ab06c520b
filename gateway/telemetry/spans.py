"""Builds the trace spans of an ended request as one tree, from the times in its exchange.

    chat MODEL
      admit         accepted to parsed
      queue         parsed to admitted
      pick          admitted to picked
      engine        one per attempt: the request to an endpoint
        first_token   sent to first token
        decode        first token to last byte
      prefill       the prefill part of a split request; its engine span also has a transfer span,
                    from the end of prefill to the first byte

span_exporter.py exports the spans. span_attribute_names.py has the names of their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gateway.protocol.response.relay import Relay
from gateway.protocol.trace_context import LegSpan, Trace, new_span_id
from gateway.request_record import Exchange
from gateway.telemetry import span_attribute_names as semconv
from gateway.telemetry.slo_outcomes import effective_usage

INTERNAL, SERVER, CLIENT = 1, 2, 3
ERROR = 2
PREFILL = "prefill"
SECOND_NS = 1_000_000_000
_WITHOUT_FAILURE = frozenset(("served", "refused", "client_gone", "preempted"))

Value = str | int | float | list[str] | None
Attributes = Mapping[str, Value]


class Attribute(msgspec.Struct, frozen=True):
    """One attribute of a trace span, in OTLP's JSON encoding."""

    key: str
    value: dict[str, object]


class Span(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A trace span in OTLP's JSON encoding: ids in hexadecimal, times in nanoseconds as text."""

    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[Attribute]
    parent_span_id: str = ""
    trace_state: str = ""
    status: dict[str, object] = {}


class _Tree:
    """The spans of one trace while they are being built.

    unix_offset  seconds to add to monotonic time to get Unix time
    """

    def __init__(self, trace: Trace, unix_offset: float) -> None:
        self.spans: list[Span] = []
        self._trace = trace
        self._unix_offset = unix_offset

    @property
    def root(self) -> str:
        return self._trace.span_id

    def add(
        self,
        name: str,
        times: tuple[float | None, float | None],
        parent: str,
        attributes: Attributes,
        kind: int = INTERNAL,
        span_id: str = "",
        failure: str = "",
    ) -> None:
        """Add a trace span if its start and end are known.

        times    start and end in monotonic seconds
        parent   id of the parent span
        kind     OTLP's number for the kind of span, such as server or client
        span_id  id of the span; "" for a new one
        failure  the error message of a failed span; "" for success
        """
        start, end = times
        if start is None or end is None:
            return
        start_ns, end_ns = self._nanoseconds(start), self._nanoseconds(max(start, end))
        encoded = [_attribute(key, value) for key, value in attributes.items() if value is not None]
        status: dict[str, object] = {"code": ERROR, "message": failure} if failure else {}
        state = self._trace.state if span_id == self._trace.span_id else ""
        span = Span(
            self._trace.trace_id,
            span_id or new_span_id(),
            name,
            kind,
            start_ns,
            end_ns,
            encoded,
            parent,
            trace_state=state,
            status=status,
        )
        self.spans.append(span)

    def _nanoseconds(self, stamp: float) -> str:
        return str(int((self._unix_offset + stamp) * SECOND_NS))


def build_spans(exchange: Exchange, trace: Trace, now: float, unix_offset: float) -> list[Span]:
    """Return all spans of a request that ended at the monotonic time `now`, the root span first."""
    spans = _Tree(trace, unix_offset)
    operation = exchange.api.operation
    is_ok = exchange.status < 500 and exchange.outcome in _WITHOUT_FAILURE
    failure = "" if is_ok else (exchange.reason or exchange.outcome)
    name = f"{operation} {exchange.model}" if exchange.model else operation
    times = (exchange.accepted_at, now)
    attributes = _root_attributes(exchange, operation)
    spans.add(name, times, trace.parent_id, attributes, SERVER, trace.span_id, failure)
    root = trace.span_id
    spans.add("admit", (exchange.accepted_at, exchange.parsed_at), root, {})
    admitted = exchange.admitted_at
    queue_end = now if admitted is None and exchange.outcome == "refused" else admitted
    reason = exchange.reason if admitted is None else None
    spans.add("queue", (exchange.parsed_at, queue_end), root, {semconv.REASON: reason})
    spans.add("pick", (admitted, exchange.picked_at), root, _pick_attributes(exchange))
    for leg, end, leg_failure in _leg_ends(exchange, trace.legs, now):
        _add_leg(spans, exchange, leg, end, leg_failure)
    return spans.spans


def _add_leg(spans: _Tree, exchange: Exchange, leg: LegSpan, end: float, failure: str) -> None:
    # Add the span of a request to an engine, with child spans if that engine answered.
    attributes: Attributes = {
        semconv.ENDPOINT: leg.endpoint,
        semconv.ROLE: leg.role,
        semconv.ERROR: failure or None,
    }
    name = "prefill" if leg.role == PREFILL else "engine"
    spans.add(name, (leg.started_at, end), spans.root, attributes, CLIENT, leg.span_id, failure)
    relay, split = exchange.relay, exchange.split
    if leg.role == PREFILL or failure or relay is None or relay.first_byte_at is None:
        return
    began = leg.started_at
    if split is not None and split.prefilled_at is not None:
        times = (max(began, split.prefilled_at), relay.first_byte_at)
        spans.add("transfer", times, leg.span_id, {semconv.TRANSPORT: split.transport})
        began = relay.first_byte_at
    ttft = {semconv.PREDICTED_TTFT: exchange.predicted_ttft_s, semconv.TTFT: exchange.ttft_s}
    spans.add("first_token", (began, relay.first_token_at), leg.span_id, ttft)
    tpot = {semconv.PREDICTED_TPOT: exchange.predicted_tpot_s, semconv.TPOT: exchange.tpot_s}
    spans.add("decode", (relay.first_token_at, relay.last_data_at), leg.span_id, tpot)


def _leg_ends(
    exchange: Exchange, legs: list[LegSpan], now: float
) -> Iterator[tuple[LegSpan, float, str]]:
    # Yield each request to an engine with its end time and its failure ("" if it succeeded).
    #
    # A request that was followed by another one of its role had failed by then.
    split, relay = exchange.split, exchange.relay
    for index, leg in enumerate(legs):
        is_prefill = leg.role == PREFILL
        followers = (
            other.started_at for other in legs[index + 1 :] if (other.role == PREFILL) == is_prefill
        )
        retried_at = next(followers, None)
        if retried_at is not None:
            yield leg, retried_at, "retried"
        elif is_prefill:
            prefilled = None if split is None else split.prefilled_at
            failure = "" if prefilled is not None else (exchange.reason or "")
            yield leg, (now if prefilled is None else prefilled), failure
        else:
            is_ok = relay is not None and relay.is_committed and exchange.outcome != "interrupted"
            last = None if relay is None else relay.last_data_at
            yield leg, last or now, "" if is_ok else (exchange.reason or exchange.outcome)


def _root_attributes(exchange: Exchange, operation: str) -> Attributes:
    # Return the attributes of the root span, which never include a prompt, a header or a key.
    call, relay = exchange.call, exchange.relay
    failure = exchange.reason or exchange.outcome
    has_failed = exchange.status >= 400 or exchange.outcome != "served"
    attributes: dict[str, Value] = {
        semconv.OPERATION: operation,
        semconv.PROVIDER: "penstock",
        semconv.METHOD: "POST",
        semconv.ROUTE: exchange.api.path,
        semconv.STATUS: exchange.status or None,
        semconv.REQUEST_ID: exchange.id,
        semconv.REQUEST_MODEL: (exchange.model if call is None else call.requested_model) or None,
        semconv.TENANT: exchange.tenant or None,
        semconv.OUTCOME: exchange.outcome,
        semconv.REASON: exchange.reason,
        semconv.RETRIES: len(exchange.retries) or None,
        semconv.ERROR: failure if has_failed else None,
        semconv.SLO_OUTCOME: exchange.slo_outcome or None,
    }
    if call is not None:
        slo = call.request.slo
        attributes |= {
            semconv.CLASS: slo.name,
            semconv.BUDGET_TTFT: slo.ttft_s,
            semconv.BUDGET_TPOT: slo.tpot_s,
        }
    if exchange.split is not None:
        attributes |= {
            semconv.SPLIT_REASON: exchange.split.reason,
            semconv.DIALECT: exchange.split.dialect or None,
        }
    if relay is not None and relay.is_committed:
        attributes |= _response_attributes(exchange, relay)
    return attributes


def _response_attributes(exchange: Exchange, relay: Relay) -> Attributes:
    usage = effective_usage(exchange, relay)
    return {
        semconv.RESPONSE_MODEL: exchange.model,
        semconv.FINISH: [relay.finish_reason] if relay.finish_reason else None,
        semconv.INPUT_TOKENS: usage.prompt_tokens,
        semconv.CACHED_TOKENS: usage.cached_tokens,
        semconv.OUTPUT_TOKENS: usage.completion_tokens,
        semconv.PREDICTED_TTFT: exchange.predicted_ttft_s,
        semconv.TTFT: exchange.ttft_s,
        semconv.PREDICTED_TPOT: exchange.predicted_tpot_s,
        semconv.TPOT: exchange.tpot_s,
    }


def _pick_attributes(exchange: Exchange) -> Attributes:
    pick = exchange.pick
    if pick is None:
        return {}
    return {
        semconv.POLICY: pick.reason,
        semconv.ENDPOINT: pick.candidate.endpoint.name,
        semconv.SCORE: pick.score,
        semconv.CANDIDATES: pick.candidate_count,
        semconv.BELIEVED_CACHED: pick.cached_tokens,
    }


def _attribute(key: str, value: Value) -> Attribute:
    if isinstance(value, list):
        return Attribute(key, {"arrayValue": {"values": [{"stringValue": item} for item in value]}})
    if isinstance(value, float):
        return Attribute(key, {"doubleValue": value})
    if isinstance(value, int):
        return Attribute(key, {"intValue": str(value)})
    return Attribute(key, {"stringValue": str(value)})
