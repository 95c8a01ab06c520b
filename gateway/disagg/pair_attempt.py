"""One attempt of a split request at a pair of engines: runs the state machine on its two legs.

An attempt sends two HTTP requests, its legs. Each leg only reports how it ended. The table in
state_machine.py says which actions follow. They are carried out immediately, one event at a time.

At the end, both reservations of capacity are released, and KV that is no longer needed is freed.
Both connections are closed, or back in their pools. leg_requests.py builds the requests, and
failure_actions.py handles failures.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType

from gateway.disagg import failure_actions
from gateway.disagg.attempt_record import AttemptState
from gateway.disagg.leg import Leg
from gateway.disagg.state_machine import END_STATES, LEG_ENDS, TABLE, Act, Event, Row, State
from gateway.forwarding import engine_refusal
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.http.eager_task import new_future
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from kvtransfer.dialects import (
    DecodeRequest,
    FinishedResponse,
    LegOrder,
    PrefillResponse,
    Prerequisite,
    UnusableResponse,
    parse_response,
)
from policies.pricing.pull_decision import patience_s
from policies.pricing.split_decision import end_transfer, generation_s
from policies.routing_types import RoutingQuery

log = logging.getLogger("penstock")

WHOLE_ANSWER_MARGIN = 10.0
"""How many times its expected time an answer may take that is not a stream.

It arrives long after its first token, so its KV may have arrived in time. Its length is unknown.
"""

# Local names: Enum attribute access is slow before Python 3.12, and every split request uses these.
_RECOMPUTING, _FAILED = State.RECOMPUTING, State.FAILED
_SEQUENTIAL, _START_PREFILL = LegOrder.SEQUENTIAL, Event.START_PREFILL
_SENT, _PREFILLED, _FIRST_TOKEN = Event.SENT, Event.PREFILLED, Event.FIRST_TOKEN
_DECODED = Event.DECODED


class PairAttempt(AttemptState):
    """One attempt to serve a request with a prefill and a decode endpoint.

    Use it as a context manager, and call run() once in the `with` block. Leaving the block releases
    both reservations and closes open connections.
    """

    __slots__ = ()

    def __enter__(self) -> PairAttempt:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_transfer_timer()
        self._leave_query()
        self._close_prefill()
        self._close_decode()
        self._leave_prefill()
        self.decode_reservation.__exit__()
        self.handoffs.give_back_number(self._number)
        relay = self.exchange.relay
        if self.state is _FAILED and self.recompute:  # the KV has not arrived
            self._on_pull_failed()
        if self.transfer is not None:
            self.transfer.cancel()
        self.handoffs.count_attempt(self.pair, self.figures, self.state, self.record, relay)

    async def run(self, query: RoutingQuery) -> UpstreamError | None:
        """Serve the request; return the error that broke it, or None if it was answered.

        `query` is the policy's input with which the two endpoints were chosen.
        """
        self.begin()
        pair = self.pair
        computes = pair.decode if pair.is_pull else pair.prefill
        self.exchange.on_reserved(self.context.route.pool_queue, query, computes)
        try:
            self.post(self._start())
            if self.state not in END_STATES:
                self._waiting = new_future(self.handoffs.outbox.loop)
                await self._waiting
            if self._bug is not None:
                raise self._bug
        except CancelledError:
            self.post(Event.CLIENT_GONE)
            raise
        return self.problem if self.state is _FAILED else None

    def _start(self) -> Event:
        dialect, is_known = self.dialect, self.words.terms.identity is not None
        if self.pair.is_pull:
            return Event.START_PULL
        if dialect.order is _SEQUENTIAL:
            return _START_PREFILL
        if is_known:
            return Event.START_BOTH
        if dialect.needs is Prerequisite.FIRST_ANSWER:
            return _START_PREFILL
        return Event.START_QUERY if dialect.needs is Prerequisite.QUERY else Event.START_BOTH

    # Events

    def post(self, event: Event) -> None:
        """Process an event: change the state and carry out the actions that the state table lists.

        This runs inside the callback that reported the event. The request's coroutine only waits
        for an end state.
        """
        if self._is_acting:
            self._events.append(event)
            return
        self._is_acting = True
        try:
            while True:
                self.state, end, acts = _ROWS[self.state][event]
                if end is not None:
                    self.handoffs.count_leg(end)
                for act in acts:
                    act(self)
                if not self._events:
                    break
                event = self._events.pop(0)
        except (
            Exception
        ) as bug:  # raised in run(): in this callback it would leave run() waiting forever
            self._bug, self.state = bug, State.FAILED
        self._is_acting = False
        if self.state in END_STATES:
            self._end_wait()

    def _on_leg_ended(self, leg: Leg, problem: UpstreamError | None) -> None:
        try:
            event = (
                self._on_prefill_ended(leg, problem)
                if leg is self.prefill
                else self._on_decode_ended(leg, problem)
            )
        except Exception as bug:  # an error here is handled as in post()
            self._bug, self.state = bug, State.FAILED
            if not self._is_acting:
                self._end_wait()
        else:
            self.post(event)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.resolve()

    def _start_transfer_timer(self) -> None:
        now = monotonic()
        self.handoffs.transfers[self] = now + self._transfer_limit_s(now)

    def _transfer_limit_s(self, now: float) -> float:
        # Return in how many seconds the decode endpoint's answer must have begun.
        pair, request = self.pair, self.context.call.request
        limit_s = self.context.split.transfer_timeout_s
        if pair.is_pull:  # the endpoint also computes the rest of the prompt
            limit_s += patience_s(pair, request.prompt_tokens, now)
        if not self.decode_reservation.has_visible_first_token:
            limit_s += WHOLE_ANSWER_MARGIN * generation_s(pair, request)
        return limit_s

    def _start_pull_timer(self) -> None:
        now, split = monotonic(), self.context.split
        limit_s = patience_s(self.pair, self.context.call.request.prompt_tokens, now)
        self.handoffs.transfers[self] = now + min(limit_s, split.transfer_timeout_s)

    def _stop_transfer_timer(self) -> None:
        self.handoffs.transfers.pop(self, None)

    def on_overdue(self) -> None:
        """Fail this attempt: its KV transfer takes too long. Handoffs.sweep() calls it once."""
        if self.exchange.is_committed:
            # Bytes of the answer arrive, though the relay may not have recognised a token in them.
            return
        ready_at = self._kv_ready_at()
        if self.transfer is not None and ready_at is not None:
            self.handoffs.transfer_times.give_up(self.transfer, ready_at, monotonic())
        self.problem = UpstreamError("transfer_timeout", f"{self.state} for too long")
        self.post(Event.OVERDUE)

    # Prefill

    def _query_bootstrap(self) -> None:
        bootstrap = self.words.terms.bootstrap
        assert bootstrap is not None
        self._query = self.handoffs.bootstraps.query(bootstrap, self._on_bootstrap_answer)

    def _leave_query(self) -> None:
        if self._query is not None:
            self._query.leave(self._on_bootstrap_answer)

    def _on_bootstrap_answer(self, problem: UpstreamError | None, page: bytes) -> None:
        identities = self.dialect.identify(page)
        if problem is None and identities:
            self.words.set_identity(identities)
            self.post(Event.KNOWN)
        else:
            message = f"no engine id from the bootstrap server: {problem}"
            self.problem = UpstreamError("bootstrap_failed", message)
            self.post(Event.PREFILL_BROKE)

    def _send_prefill(self) -> None:
        reservation = self.prefill_reservation
        assert reservation is not None
        head, body = self.words.prefill(reservation)
        inbox = self.inbox = InternalAnswer(is_kept=self.dialect.reads_answer)
        relay = Relay(b"", is_http_1_0=True)
        leg = self.prefill = Leg(reservation.upstream, head, body, relay, inbox, self._on_leg_ended)
        self.record.prefill_sent_at = now = monotonic()
        self.exchange.sent_at = self.exchange.sent_at or now
        leg.start()

    def _on_prefill_ended(self, leg: Leg, problem: UpstreamError | None) -> Event:
        leg.release()
        relay = leg.relay
        if problem is None and relay.is_refused:
            problem = self._judge_refusal(relay)
        elif problem is None and relay.has_error_event:
            problem = UpstreamError("engine_error", "the engine sent an error event")
        if problem is not None:
            self.problem = problem
            return Event.PREFILL_BROKE
        if self._refused is not None:
            if self.pair.is_pull:  # the client gets an answer of the other endpoint
                self._refused = None
            return Event.PREFILL_REFUSED
        return self._on_prefilled(relay)

    def _judge_refusal(self, relay: Relay) -> UpstreamError | None:
        # Keep an engine's error response for the client; return an error if the engine failed.
        try:
            status = engine_refusal.refusal_status(relay)
        except UpstreamError as broke:
            # The error's traceback refers to this frame and its callers, a reference cycle.
            return broke.with_traceback(None)
        if self.exchange.is_committed:
            message = f"the engine answered {status} after the other endpoint had begun"
            return UpstreamError(f"status_{status}", message)
        self._refused = relay
        return None

    def _on_prefilled(self, relay: Relay) -> Event:
        # Handle a complete prefill answer; return the event for what it contains.
        #
        # Releases the prefill endpoint's capacity reservation.
        reservation, inbox = self.prefill_reservation, self.inbox
        assert reservation is not None
        assert inbox is not None
        self.record.prefilled_at = now = monotonic()
        if self.transfer is not None:
            self.transfer.on_ready(now)
        answer = parse_response(inbox.body) if self.dialect.reads_answer else None
        usage = relay.usage
        if isinstance(answer, PrefillResponse):
            usage = TokenUsage(answer.prompt_tokens, 1, answer.cached_tokens)
        reservation.on_first_token()
        reservation.on_served(usage)
        self._leave_prefill()
        if answer is None:
            self.words.note_usage(usage)
            meaning = None
        else:
            meaning = failure_actions.refuse_longer_prompt(self, answer) or self.words.interpret(
                answer, alone=self.decode is None
            )
        if isinstance(meaning, FinishedResponse):
            self._finished = meaning
            return Event.FINISHED
        if isinstance(meaning, UnusableResponse):
            return self._on_unusable(meaning)
        self.handover = meaning or self.handover
        self.decode_reservation.on_handed_over()
        return _PREFILLED

    def _on_unusable(self, answer: UnusableResponse) -> Event:
        name = self.pair.prefill.candidate.endpoint.name
        log.warning("the prefill answer of endpoint %s cannot be used: %s", name, answer.reason)
        if not self.exchange.is_committed or self.state is State.DECODING:
            return Event.UNUSABLE
        self.problem = UpstreamError("prefill_unusable", answer.reason)
        return Event.PREFILL_BROKE

    # Decode

    def _send_decode(self) -> None:
        # Send the decode request with the handoff, which tells the engine where the KV cache is.
        #
        # In a concurrent dialect, the handoff does not depend on the prefill answer.
        handover = self.handover
        if handover is None:
            result = self.dialect.decode(self.words.terms, None)
            # The prefill engine's identity, if the dialect needs it, was learned before.
            assert isinstance(result, DecodeRequest), result
            handover = self.handover = result
        self._decode_with(handover)

    def _send_to_other_decode(self) -> None:
        if failure_actions.reserve_other_decode(self):
            self._send_decode()
        else:
            self.post(Event.NO_OTHER_DECODE)

    def _send_whole(self) -> None:
        # The prefiller's cache is of no use: the decoder's count is right.
        self.record.cached_tokens = None
        self.record.pulled_tokens = 0
        self._on_pull_failed()
        self.decode_reservation.on_recompute()
        self._leave_prefill()
        if self.transfer is not None:
            self.transfer.cancel()
        self._decode_with(None)

    def _on_pull_failed(self) -> None:
        if self.pair.is_pull:
            source = self.pair.prefill.candidate.endpoint.name
            self.handoffs.pull_pauses.on_failed(source, monotonic())

    def _decode_with(self, handover: DecodeRequest | None) -> None:
        exchange, reservation, client = self.exchange, self.decode_reservation, self.context.client
        head, body = self.words.decode(reservation, handover)
        relay = self.words.relay(reservation.endpoint, handover)
        relay.on_first_token = self._on_first_token
        exchange.reservation, exchange.relay = reservation, relay
        leg = Leg(reservation.upstream, head, body, relay, client, self._on_leg_ended)
        self.decode = exchange.sent_request = leg
        self.record.handed_over_at = now = monotonic()
        exchange.sent_at = exchange.sent_at or now
        leg.start(self._on_sent)

    def _on_sent(self) -> None:
        self.post(_SENT)

    def _learn_transfer_time(self) -> None:
        # End the forecast of the KV transfer, because the first token has come, and learn from it.
        #
        # The answer may take long to end, and the next requests need the link's speed now.
        # The speed is unknown if the answer comes immediately after its last token, or if the
        # prefill endpoint answers after the decoder.
        transfer, now = self.transfer, monotonic()
        if transfer is None:
            return
        end_transfer(transfer, self.pair, now)
        self.handoffs.transfer_times.learn(transfer, self._kv_ready_at(), now)

    def _kv_ready_at(self) -> float | None:
        # Return when the transfer could begin; None if that or its end cannot be known.
        prefilled_at = self.record.prefilled_at
        if prefilled_at is None or not self.decode_reservation.has_visible_first_token:
            return None
        return prefilled_at + self.context.split.splitter.rule.handoff_s

    def _on_first_token(self) -> None:
        self.exchange.on_first_token()
        if self.state is not _RECOMPUTING:
            if self.pair.is_pull:
                self.handoffs.pull_pauses.forget(self.pair.prefill.candidate.endpoint.name)
            self.figures.add_transferred(self.pair, self.context.call.request.prompt_tokens)
            self._learn_transfer_time()
        # A late answer to a pull's first request needs the members to have its KV freed.
        if self.prefill is None or not self.prefill.is_leaving:
            self.words.release()
        self.post(_FIRST_TOKEN)

    def _on_decode_ended(self, leg: Leg, problem: UpstreamError | None) -> Event:
        relay, reservation = leg.relay, self.decode_reservation
        if problem is None and relay.is_refused:
            problem = self._judge_refusal(relay)
        if problem is not None:
            self.problem = problem
            return Event.UNREACHED if leg.sent_at is None else Event.DECODE_BROKE
        if self._refused is not None:
            return Event.DECODE_REFUSED
        if relay.has_error_event:
            self.exchange.set_interrupted("engine_error")
            reservation.on_failed(UpstreamError("engine_error", "the engine sent an error event"))
        else:
            self.exchange.status = 200
            reservation.on_served(relay.usage)
        return _DECODED

    # The answer without a decoder

    def _answer(self) -> None:
        assert self._finished is not None
        exchange: Exchange = (
            self.exchange
        )  # the annotation tells tools/compile/extension_classes.py whose method is passed on
        client, prefill = self.context.client, self.pair.prefill
        exchange.pick, exchange.reservation = prefill, None
        relay = exchange.relay = self.words.relay(prefill.candidate.endpoint, None)
        relay.on_first_token = exchange.on_first_token
        client.write(relay.feed(self.words.finished(self._finished), monotonic()))
        exchange.status = 200

    def _pass_on(self) -> None:
        refused, prefill = self._refused, self.prefill
        assert refused is not None
        is_prefill = prefill is not None and prefill.relay is refused
        pick = self.pair.prefill if is_prefill else self.pair.decode
        name = pick.candidate.endpoint.name
        engine_refusal.forward_refusal(self.exchange, self.context.client, refused, name)

    # The end

    def _close_prefill(self) -> None:
        if self.prefill is not None and not self.prefill.is_over:
            self.prefill.close()
            self.handoffs.count_leg(("prefill", "closed"))

    def _close_decode(self) -> None:
        if self.decode is not None and not self.decode.is_over:
            self.decode.close()
            self.handoffs.count_leg(("decode", "closed"))

    def _leave_prefill(self) -> None:
        if self.prefill_reservation is not None:
            self.prefill_reservation.__exit__()
            self.prefill_reservation = None


Do = Callable[[PairAttempt], None]

_DO: Mapping[Act, Do] = MappingProxyType(
    {
        Act.QUERY_BOOTSTRAP: PairAttempt._query_bootstrap,
        Act.LEAVE_QUERY: PairAttempt._leave_query,
        Act.SEND_PREFILL: PairAttempt._send_prefill,
        Act.SEND_DECODE: PairAttempt._send_decode,
        Act.SEND_WHOLE: PairAttempt._send_whole,
        Act.OTHER_DECODE: PairAttempt._send_to_other_decode,
        Act.ANSWER: PairAttempt._answer,
        Act.PASS_ON: PairAttempt._pass_on,
        Act.CLOSE_PREFILL: PairAttempt._close_prefill,
        Act.CLOSE_DECODE: PairAttempt._close_decode,
        Act.ABORT_PREFILL: failure_actions.abort_prefill,
        Act.FREE_BY_DECODE: failure_actions.free_by_decode,
        Act.FREE_BY_REFUSER: failure_actions.free_by_refuser,
        Act.FREE_ELSEWHERE: failure_actions.free_elsewhere,
        Act.BLAME_PREFILL: failure_actions.blame_prefill,
        Act.BLAME_DECODE: failure_actions.blame_decode,
        Act.SUSPECT_BOTH: failure_actions.suspect_both,
    }
)


_TIMERS: Mapping[State, Do] = MappingProxyType(
    {
        State.TRANSFERRING: PairAttempt._start_transfer_timer,
        State.PULLING: PairAttempt._start_pull_timer,
    }
)


def _due(before: State, row: Row) -> tuple[Do, ...]:
    # Return the actions that a row of the table requires, in order.
    #
    # Where a pull or the transfer begins or ends, the start or stop of its timer is one of them.
    acts = tuple(_DO[act] for act in row.acts)
    if before is row.state:
        return acts
    if row.state in _TIMERS:
        return (_TIMERS[row.state], *acts)
    return (PairAttempt._stop_transfer_timer, *acts) if before in _TIMERS else acts


# The table by state, with everything looked up once: the next state, the end of a leg that the
# event is, and what is due. Nothing follows an end state.
_ROWS: dict[State, dict[Event, tuple[State, tuple[str, str] | None, tuple[Do, ...]]]] = {
    state: dict.fromkeys(Event, (state, None, ())) if state in END_STATES else {} for state in State
}
for (_state, _event), _row in TABLE.items():
    _ROWS[_state][_event] = (_row.state, LEG_ENDS.get(_event), _due(_state, _row))
