"""The data of one attempt at a split request: reservations, its two HTTP requests, and the handoff.

gateway/disagg/pair_attempt.py changes this state according to the table in
gateway/disagg/state_machine.py. gateway/disagg/failure_actions.py handles failures.
"""

from __future__ import annotations

from time import monotonic

from gateway.disagg.bootstrap_client import BootstrapQuery
from gateway.disagg.leg import Leg
from gateway.disagg.leg_requests import LegRequests, SplitContext, attempt_dialect, one_token
from gateway.disagg.state_machine import Event, State
from gateway.fleet.reservation import Reservation
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.http.eager_task import EagerFuture
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.request_record import Exchange, SplitRecord
from kvtransfer.dialects import DecodeRequest, FinishedResponse
from policies.pricing.split_decision import EndpointPair, begin_transfer

# A local name: Enum attribute access is slow before Python 3.12.
_RESERVED = State.RESERVED


class AttemptState:
    """The state of one attempt to serve a split request.

    Creating the object reserves capacity at both engines.

    prefill              the HTTP request to the prefill engine
    prefill_reservation  capacity reserved at the prefill engine, until the prompt is computed
    inbox                the buffer for the prefill engine's answer
    decode               the HTTP request to the decode engine
    decode_reservation   capacity reserved at the decode engine, until the attempt ends
    handover             the part of the decode request that names where the KV cache is stored
    problem              the error that ended the attempt
    suspects             names of the endpoints that this request must not try again
    transfer             the forecast of the KV transfer, for rules that use its cost
    recompute            whether the next attempt should compute the whole request at one endpoint
    """

    __slots__ = (
        *("_bug", "_events", "_finished", "_is_acting", "_number", "_query", "_refused"),
        *("_waiting", "context", "decode", "decode_reservation", "dialect", "exchange", "figures"),
        *("handoffs", "handover", "inbox", "pair", "prefill", "prefill_reservation", "problem"),
        *("recompute", "record", "state", "suspects"),
        *("transfer", "words"),
    )

    def __init__(self, context: SplitContext, pair: EndpointPair, record: SplitRecord) -> None:
        endpoints, request = context.gateway.endpoints, context.call.request
        handoffs = self.handoffs = context.gateway.handoffs
        figures = self.figures = handoffs.figures(pair)
        self.exchange: Exchange = context.exchange
        self.context, self.record, self.pair = context, record, pair
        self.dialect = attempt_dialect(context.split, pair)
        self.prefill: Leg | None = None
        self.inbox: InternalAnswer | None = None
        self.decode: Leg | None = None
        self.handover: DecodeRequest | None = None
        self.problem: UpstreamError | None = None
        self.state = _RESERVED
        self.suspects: list[str] = []
        self.recompute = self._is_acting = False
        self._events: list[Event] = []
        self._bug: Exception | None = None
        self._query: BootstrapQuery | None = None
        self._finished: FinishedResponse | None = None
        self._refused: Relay | None = None
        self._waiting: EagerFuture | None = None
        # An endpoint that hands over a beginning learns nothing about the prompt.
        fingerprint = None if pair.is_pull else context.fingerprint
        reservation = endpoints.reserve(pair.prefill, one_token(request, pair), fingerprint)
        self.prefill_reservation: Reservation | None = reservation
        self.decode_reservation = endpoints.reserve_decode(
            pair.decode, request, context.fingerprint, pair.pulled_tokens
        )
        if pair.is_pull:  # what the endpoint still has to compute is known too little
            reservation.leave_untimed()
        else:
            record.predicted_ttft_s = figures.expected_s(reservation.entry.predicted_ttft_s)
        self.transfer = begin_transfer(
            handoffs.transfer_times,
            context.split.splitter.rule,
            pair,
            request.prompt_tokens,
            monotonic(),
        )
        self._number = handoffs.take_number()

    def begin(self) -> None:
        """Create `words`, the object that builds the attempt's HTTP requests to the two engines."""
        self.words = LegRequests(self.context, self.record, self.pair, self._number)
