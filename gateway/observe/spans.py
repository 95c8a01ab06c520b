"""A request that is over as one tree of spans, made from the stamps that it carries anyway.

    chat MODEL
admit     accepted -> understood             queue     -> a Permit             pick     -> an
                endpoint chosen
      engine    a leg, as the engine was told of it: one for every attempt
        first_token   sent -> first token          decode    -> last byte
prefill   the other leg of a split request; then engine has transfer (prefilled -> first byte) as
                well

Lives here: the tree. Not here: sending it (export.py), names of attributes (genai.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gateway.exchange import Exchange
from gateway.kept import usage_of
from gateway.observe import genai
from gateway.trace import Trace, TraceLeg, new_id

INTERNAL, SERVER, CLIENT = 1, 2, 3
ERROR = 2
PREFILL = "prefill"
SECOND_NS = 1_000_000_000

Value = str | int | float | list[str] | None
Attributes = Mapping[str, Value]


class Attribute(msgspec.Struct, frozen=True):
    """One attribute, as OTLP's JSON wants it."""

    key: str
    value: dict[str, object]


class Span(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """One span, as OTLP's JSON wants it: ids in hexadecimal, times in nanoseconds as text."""

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
    """Spans of one trace under construction.

    `zero` is when the monotonic clock began, in Unix time.
    """

    def __init__(self, trace: Trace, zero: float) -> None:
        self.spans: list[Span] = []
        self._trace = trace
        self._zero = zero

    @property
    def root(self) -> str:
        return self._trace.span_id

    def add(
        self,
        name: str,
        times: tuple[float | None, float | None],
        parent: str,
        told: Attributes,
        kind: int = INTERNAL,
        span_id: str = "",
        failed: str = "",
    ) -> None:
        """Another span, if both of its times are known; an id of its own unless it was given one.
        """
        start, end = times
        if start is None or end is None:
            return
        began, ended = self._nanoseconds(start), self._nanoseconds(max(start, end))
        shown = [_attribute(key, value) for key, value in told.items() if value is not None]
        status: dict[str, object] = {"code": ERROR, "message": failed} if failed else {}
        state = self._trace.state if span_id == self._trace.span_id else ""
        self.spans.append(
            Span(
                *(self._trace.trace_id, span_id or new_id(), name, kind, began, ended, shown, parent),
                trace_state=state,
                status=status,
            )
        )

    def _nanoseconds(self, stamp: float) -> str:
        return str(int((self._zero + stamp) * SECOND_NS))


def tree(x: Exchange, trace: Trace, now: float, zero: float) -> list[Span]:
    """All spans of a request that ended at `now`, the root first."""
    made = _Tree(trace, zero)
    operation = genai.OPERATIONS.get(x.api, "request")
    failed = "" if x.status < 500 and x.outcome in ("served", "refused", "client_gone") else (x.reason or x.outcome)
    name = f"{operation} {x.model}" if x.model else operation
    made.add(name, (x.accepted_at, now), trace.parent_id, _root(x, operation), SERVER, trace.span_id, failed)
    root = trace.span_id
    made.add("admit", (x.accepted_at, x.parsed_at), root, {})
    entered = x.admitted_at if x.admitted_at is not None else (now if x.outcome == "refused" else None)
    made.add("queue", (x.parsed_at, entered), root, {genai.REASON: x.reason if x.admitted_at is None else None})
    made.add("pick", (x.admitted_at, x.picked_at), root, _pick(x))
    for leg, end, failure in _ends(x, trace.legs, now):
        _leg(made, x, leg, end, failure)
    return made.spans


def _leg(made: _Tree, x: Exchange, leg: TraceLeg, end: float, failure: str) -> None:
    """A request to an engine; the one that was answered has its parts below it."""
    told: Attributes = {genai.ENDPOINT: leg.endpoint, genai.ROLE: leg.role, genai.ERROR: failure or None}
    root = made.root
    if leg.role == PREFILL:
        made.add("prefill", (leg.began, end), root, told, CLIENT, leg.span_id, failure)
        return
    made.add("engine", (leg.began, end), root, told, CLIENT, leg.span_id, failure)
    relay, split = x.relay, x.split
    if failure or relay is None or relay.first_byte_at is None:
        return
    began = leg.began
    if split is not None and split.prefilled_at is not None:
        at = max(began, split.prefilled_at)
        made.add("transfer", (at, relay.first_byte_at), leg.span_id, {genai.TRANSPORT: split.transport})
        began = relay.first_byte_at
    first = {genai.PREDICTED_TTFT: x.predicted_ttft_s, genai.TTFT: x.ttft_s}
    made.add("first_token", (began, relay.first_token_at), leg.span_id, first)
    rest = {genai.PREDICTED_TPOT: x.predicted_tpot_s, genai.TPOT: x.tpot_s}
    made.add("decode", (relay.first_token_at, relay.last_at), leg.span_id, rest)


def _ends(x: Exchange, legs: list[TraceLeg], now: float) -> Iterator[tuple[TraceLeg, float, str]]:
    """Each leg with its end and what it failed of.

    One that another of its kind followed had failed by then.
    """
    split = x.split
    for at, leg in enumerate(legs):
        later = next((each.began for each in legs[at + 1 :] if (each.role == PREFILL) == (leg.role == PREFILL)), None)
        if later is not None:
            yield leg, later, "retried"
        elif leg.role == PREFILL:
            prefilled = None if split is None else split.prefilled_at
            yield leg, (now if prefilled is None else prefilled), "" if prefilled is not None else (x.reason or "")
        else:
            ok = x.relay is not None and x.relay.committed and x.outcome != "interrupted"
            last = None if x.relay is None else x.relay.last_at
            yield leg, last or now, "" if ok else (x.reason or x.outcome)


def _root(x: Exchange, operation: str) -> Attributes:
    """What there is to say of the request as a whole. Never a prompt, a header or a key."""
    told: dict[str, Value] = {
        genai.OPERATION: operation,
        genai.PROVIDER: "penstock",
        genai.METHOD: "POST",
        genai.ROUTE: str(x.api),
        genai.STATUS: x.status or None,
        genai.REQUEST_ID: x.id,
        genai.REQUEST_MODEL: (x.model if x.call is None else x.call.asked_model) or None,
        genai.TENANT: x.tenant or None,
        genai.OUTCOME: x.outcome,
        genai.REASON: x.reason,
        genai.RETRIES: len(x.retries) or None,
        genai.ERROR: (x.reason or x.outcome) if x.status >= 400 or x.outcome != "served" else None,
        genai.KEPT: x.kept or None,
    }
    if x.call is not None:
        slo = x.call.request.slo
        told |= {genai.CLASS: slo.name, genai.BUDGET_TTFT: slo.ttft_s, genai.BUDGET_TPOT: slo.tpot_s}
    if x.split is not None:
        told |= {genai.SPLIT_REASON: x.split.reason, genai.DIALECT: x.split.dialect or None}
    if x.relay is not None and x.relay.committed:
        usage = usage_of(x, x.relay)
        told |= {
            genai.RESPONSE_MODEL: x.model,
            genai.FINISH: [x.relay.finish_reason] if x.relay.finish_reason else None,
            genai.INPUT_TOKENS: usage.prompt_tokens,
            genai.CACHED_TOKENS: usage.cached_tokens,
            genai.OUTPUT_TOKENS: usage.completion_tokens,
            genai.PREDICTED_TTFT: x.predicted_ttft_s,
            genai.TTFT: x.ttft_s,
            genai.PREDICTED_TPOT: x.predicted_tpot_s,
            genai.TPOT: x.tpot_s,
        }
    return told


def _pick(x: Exchange) -> Attributes:
    pick = x.pick
    if pick is None:
        return {}
    return {
        genai.POLICY: pick.reason,
        genai.ENDPOINT: pick.candidate.endpoint.name,
        genai.SCORE: pick.score,
        genai.CONSIDERED: pick.considered,
        genai.BELIEVED_CACHED: pick.cached_tokens,
    }


def _attribute(key: str, value: Value) -> Attribute:
    if isinstance(value, list):
        return Attribute(key, {"arrayValue": {"values": [{"stringValue": each} for each in value]}})
    if isinstance(value, float):
        return Attribute(key, {"doubleValue": value})
    if isinstance(value, int):
        return Attribute(key, {"intValue": str(value)})
    return Attribute(key, {"stringValue": str(value)})
