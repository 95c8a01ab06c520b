"""One attempt of a pair at one request: two booked places, two legs, and the table of life.py between them.

Legs only tell what happened to them; what follows stands in the table and is carried out at once, one event at a time.
Whatever happens, both places are given back, both connections are closed or back in their pools, and KV that nobody
will read is freed. Not here: what the legs' requests and answers say (words.py), and what is due when something went
wrong (mishaps.py).
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType

from gateway import legs
from gateway.booking import Booking
from gateway.errand import Landing, landing
from gateway.exchange import Exchange, SplitRecord
from gateway.relay import Relay, UpstreamBroke
from gateway.split import mishaps
from gateway.split.bootstrap import Query
from gateway.split.inbox import Inbox
from gateway.split.leg import Leg
from gateway.split.life import ENDS, LEG_ENDS, TABLE, Act, Event, Row, State
from gateway.split.words import Words, Work, one_token
from gateway.told import Usage
from kvtransfer.dialects import Answer, Finished, Handover, Needs, Order, Unusable, read_answer
from policies.model import Ask
from policies.split import Pair

log = logging.getLogger("penstock")

# Before Python 3.12 an Enum finds its members slowly: those that every split request passes are at hand.
_BOOKED, _RECOMPUTING, _FAILED = State.BOOKED, State.RECOMPUTING, State.FAILED
_SEQUENTIAL, _START_PREFILL = Order.SEQUENTIAL, Event.START_PREFILL
_SENT, _PREFILLED, _FIRST_TOKEN, _DECODED = Event.SENT, Event.PREFILLED, Event.FIRST_TOKEN, Event.DECODED


class PairAttempt:
    """run() it once. Afterwards `suspects` names those who should not be tried again, `recompute` whether the whole
    request had better be computed in one place.

    prefill, inbox, prefill_place  P's leg, what it has answered, and its place until the prompt is computed
    decode, handover, decode_place  D's leg, what it is told, and its place
    problem  what broke
    """

    __slots__ = (
        *("_acting", "_bug", "_events", "_finished", "_number", "_query", "_refused", "_waiting"),
        *("decode", "decode_place", "dialect", "figures", "handoffs", "handover", "inbox", "pair", "prefill"),
        *("prefill_place", "problem", "recompute", "record", "state", "suspects", "words", "work", "x"),
    )

    def __init__(self, work: Work, pair: Pair, record: SplitRecord) -> None:
        endpoints, request = work.gateway.endpoints, work.call.request
        handoffs = self.handoffs = work.gateway.handoffs
        figures = self.figures = handoffs.figures(pair)
        self.x: Exchange = work.x
        self.work, self.record, self.pair = work, record, pair
        self.dialect = work.split.dialect
        self.prefill: Leg | None = None
        self.inbox: Inbox | None = None
        self.decode: Leg | None = None
        self.handover: Handover | None = None
        self.problem: UpstreamBroke | None = None
        self.state = _BOOKED
        self.suspects: list[str] = []
        self.recompute = self._acting = False
        self._events: list[Event] = []
        self._bug: Exception | None = None
        self._query: Query | None = None
        self._finished: Finished | None = None
        self._refused: Relay | None = None
        self._waiting: Landing | None = None
        place = endpoints.book(pair.prefill, one_token(request), work.fingerprint)
        self.prefill_place: Booking | None = place
        self.decode_place = endpoints.reserve(pair.decode, request, work.fingerprint)
        record.predicted_ttft_s = figures.expected_s(place.place.predicted_ttft_s)
        self._number = handoffs.number()

    async def run(self, ask: Ask) -> UpstreamBroke | None:
        """None when the client has been answered, whatever the answer; else what broke. `ask` led to the pair."""
        work, prefill = self.work, self.pair.prefill
        try:
            self.words = Words(work, self.record, prefill.candidate.endpoint, self._number)
            self.x.booked(work.route.room, ask, prefill)
            self.post(self._start())
            if self.state not in ENDS:
                self._waiting = landing(self.handoffs.outbox.loop)
                await self._waiting
            if self._bug is not None:
                raise self._bug
        except CancelledError:
            self.post(Event.CLIENT_GONE)
            raise
        finally:
            self._leave()
        return self.problem if self.state is _FAILED else None

    def _start(self) -> Event:
        dialect, known = self.dialect, self.words.terms.identity is not None
        if dialect.order is _SEQUENTIAL or (dialect.needs is Needs.FIRST_ANSWER and not known):
            return _START_PREFILL
        return Event.START_ASKING if dialect.needs is Needs.QUERY and not known else Event.START_BOTH

    # Events

    def post(self, event: Event) -> None:
        """Something has happened. What follows is done at once, in the callback that brought the news; the line, which
        only waits for the end, goes on when it has come. The one interpreter of the table."""
        if self._acting:
            self._events.append(event)
            return
        self._acting = True
        try:
            while True:
                self.state, end, acts = _ROWS[self.state][event]
                if end is not None:
                    self.handoffs.count(end)
                for act in acts:
                    act(self)
                if not self._events:
                    break
                event = self._events.pop(0)
        except Exception as bug:  # it must not end in the callback of a leg, with the line waiting for ever
            self._bug, self.state = bug, State.FAILED
        self._acting = False
        if self.state in ENDS:
            self._end_wait()

    def _hear(self, leg: Leg, problem: UpstreamBroke | None) -> None:
        """A leg has ended."""
        try:
            event = self._prefilled(leg, problem) if leg is self.prefill else self._decoded(leg, problem)
        except Exception as bug:  # as in post()
            self._bug, self.state = bug, State.FAILED
            if not self._acting:
                self._end_wait()
        else:
            self.post(event)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.land()

    def _watch(self) -> None:
        self.handoffs.transfers[self] = monotonic() + self.work.split.transfer_timeout_s

    def _watch_no_more(self) -> None:
        self.handoffs.transfers.pop(self, None)

    def overdue(self) -> None:
        """Fetching KV has lasted too long: told once by the sweep."""
        if self.x.committed:
            return  # it flows: what the relay does not know for a token is one all the same
        self.problem = UpstreamBroke("transfer_timeout", f"{self.state} for too long")
        self.post(Event.OVERDUE)

    # Prefill

    def _ask(self) -> None:
        bootstrap = self.words.terms.bootstrap
        assert bootstrap is not None
        self._query = self.handoffs.bootstraps.ask(bootstrap, self._told)

    def _stop_asking(self) -> None:
        if self._query is not None:
            self._query.leave(self._told)

    def _told(self, problem: UpstreamBroke | None, page: bytes) -> None:
        found = self.dialect.identify(page)
        if problem is None and found:
            self.words.introduced(found)
            self.post(Event.KNOWN)
        else:
            self.problem = UpstreamBroke("bootstrap_failed", f"no engine id from the bootstrap server: {problem}")
            self.post(Event.PREFILL_BROKE)

    def _send_prefill(self) -> None:
        place = self.prefill_place
        assert place is not None
        head, body = self.words.prefill(place)
        inbox = self.inbox = Inbox(keep=self.dialect.reads_answer)
        leg = self.prefill = Leg(place.upstream, head, body, Relay(b"", http_1_0=True), inbox, self._hear)
        self.record.prefill_sent_at = now = monotonic()
        self.x.sent_at = self.x.sent_at or now
        leg.start()

    def _prefilled(self, leg: Leg, problem: UpstreamBroke | None) -> Event:
        leg.release()
        relay = leg.relay
        if problem is None and relay.refused:
            problem = self._judged(relay)
        elif problem is None and relay.failed_in_stream:
            problem = UpstreamBroke("engine_error", "error event in the stream")
        if problem is not None:
            self.problem = problem
            return Event.PREFILL_BROKE
        return Event.PREFILL_REFUSED if self._refused is not None else self._computed(relay)

    def _judged(self, relay: Relay) -> UpstreamBroke | None:
        """An engine's refusal: kept for the client, or trouble of the engine's own."""
        try:
            status = legs.refusal(relay)
        except UpstreamBroke as broke:
            return broke.with_traceback(None)  # that leads back here, and so to whoever keeps it: a cycle
        if self.x.committed:
            return UpstreamBroke(f"status_{status}", f"the engine answered {status} after its twin had begun")
        self._refused = relay
        return None

    def _computed(self, relay: Relay) -> Event:
        """The prompt is computed: its place is free again, and its KV waits, or not."""
        place, inbox = self.prefill_place, self.inbox
        assert place is not None
        assert inbox is not None
        self.record.prefilled_at = monotonic()
        answer = read_answer(inbox.body) if self.dialect.reads_answer else None
        place.first_token()
        place.served(
            Usage(answer.prompt_tokens, 1, answer.cached_tokens) if isinstance(answer, Answer) else relay.usage
        )
        self._leave_prefill()
        if answer is None:
            self.words.prefilled(relay.usage)
        meaning = None if answer is None else self.words.meaning(answer, alone=self.decode is None)
        if isinstance(meaning, Finished):
            self._finished = meaning
            return Event.FINISHED
        if isinstance(meaning, Unusable):
            return self._unusable(meaning)
        self.handover = meaning or self.handover
        self.decode_place.handed_over()
        return _PREFILLED

    def _unusable(self, answer: Unusable) -> Event:
        log.warning("endpoint %s handed over nothing usable: %s", self.pair.prefill.candidate.endpoint.name, answer.why)
        if not self.x.committed or self.state is State.DECODING:
            return Event.UNUSABLE
        self.problem = UpstreamBroke("prefill_unusable", answer.why)
        return Event.PREFILL_BROKE

    # Decode

    def send_decode(self) -> None:
        """With the handoff that there is, or the one that needs no answer of P's."""
        handover = self.handover
        if handover is None:
            found = self.dialect.decode(self.words.terms, None)
            assert isinstance(found, Handover), found  # what it needs was learnt before
            handover = self.handover = found
        self._decode_with(handover)

    def _send_whole(self) -> None:
        self.record.cached_tokens = None  # what P had cached is of no use: D's own word holds
        self.decode_place.recompute()
        self._decode_with(None)

    def _decode_with(self, handover: Handover | None) -> None:
        x, place, client = self.x, self.decode_place, self.work.client
        head, body = self.words.decode(place, handover)
        relay = self.words.relay(place.endpoint, handover)
        relay.on_first = self._first_token
        x.booking, x.relay = place, relay
        leg = x.sent = self.decode = Leg(place.upstream, head, body, relay, client, self._hear)
        self.record.handed_over_at = now = monotonic()
        x.sent_at = x.sent_at or now
        leg.start(self._sent)

    def _sent(self) -> None:
        self.post(_SENT)

    def _first_token(self) -> None:
        if self.state is not _RECOMPUTING:
            self.figures.travelled(self.pair, self.work.call.request.prompt_tokens)
        self.x.first_token()
        self.words.forget()
        self.post(_FIRST_TOKEN)

    def _decoded(self, leg: Leg, problem: UpstreamBroke | None) -> Event:
        relay, place = leg.relay, self.decode_place
        if problem is None and relay.refused:
            problem = self._judged(relay)
        if problem is not None:
            self.problem = problem
            return Event.UNREACHED if leg.sent_at is None else Event.DECODE_BROKE
        if self._refused is not None:
            return Event.DECODE_REFUSED
        if relay.failed_in_stream:
            self.x.interrupted("engine_error")
            place.failed(UpstreamBroke("engine_error", "error event in the stream"))
        else:
            self.x.status = 200
            place.served(relay.usage)
        return _DECODED

    # The answer without a decoder

    def _answer(self) -> None:
        """The prefill answer goes through a relay like any other, as if the engine had been asked for just this."""
        assert self._finished is not None
        x: Exchange = self.x  # deploy/classes.py reads here whose first_token() is handed on
        client = self.work.client
        x.pick, x.booking = self.pair.prefill, None
        relay = x.relay = self.words.relay(self.pair.prefill.candidate.endpoint, None)
        relay.on_first = x.first_token
        client.write(relay.feed(self.words.finished(self._finished), monotonic()))
        x.status = 200

    def _pass_on(self) -> None:
        refused, first = self._refused, self.prefill
        assert refused is not None
        pick = self.pair.prefill if first is not None and first.relay is refused else self.pair.decode
        legs.pass_on(self.x, self.work.client, refused, pick.candidate.endpoint.name)

    # The end

    def _close_prefill(self) -> None:
        if self.prefill is not None and not self.prefill.over:
            self.prefill.close()
            self.handoffs.count(("prefill", "closed"))

    def _close_decode(self) -> None:
        if self.decode is not None and not self.decode.over:
            self.decode.close()
            self.handoffs.count(("decode", "closed"))

    def _leave_prefill(self) -> None:
        if self.prefill_place is not None:
            self.prefill_place.__exit__()
            self.prefill_place = None

    def _leave(self) -> None:
        self._watch_no_more()
        self._stop_asking()
        self._close_prefill()
        self._close_decode()
        self._leave_prefill()
        self.decode_place.__exit__()
        self.handoffs.give_back(self._number)
        self.handoffs.ended(self.pair, self.figures, self.state, self.record, self.x.relay)


Do = Callable[[PairAttempt], None]

_DO: Mapping[Act, Do] = MappingProxyType(
    {
        Act.ASK: PairAttempt._ask,
        Act.STOP_ASKING: PairAttempt._stop_asking,
        Act.SEND_PREFILL: PairAttempt._send_prefill,
        Act.SEND_DECODE: PairAttempt.send_decode,
        Act.SEND_WHOLE: PairAttempt._send_whole,
        Act.OTHER_DECODE: mishaps.other_decode,
        Act.ANSWER: PairAttempt._answer,
        Act.PASS_ON: PairAttempt._pass_on,
        Act.CLOSE_PREFILL: PairAttempt._close_prefill,
        Act.CLOSE_DECODE: PairAttempt._close_decode,
        Act.CALL_OFF_PREFILL: mishaps.call_off_prefill,
        Act.FREE_BY_DECODE: mishaps.free_by_decode,
        Act.FREE_BY_REFUSER: mishaps.free_by_refuser,
        Act.FREE_ELSEWHERE: mishaps.free_elsewhere,
        Act.BLAME_PREFILL: mishaps.blame_prefill,
        Act.BLAME_DECODE: mishaps.blame_decode,
        Act.BLAME_NOBODY: mishaps.blame_nobody,
    }
)


def _due(before: State, row: Row) -> tuple[Do, ...]:
    """What a row asks for, in order, with the watch over the KV's way."""
    acts = tuple(_DO[act] for act in row.acts)
    if before is row.state or State.TRANSFERRING not in (before, row.state):
        return acts
    return (PairAttempt._watch if row.state is State.TRANSFERRING else PairAttempt._watch_no_more, *acts)


# The table by state, with everything looked up once: the next state, the leg's end that the event is, and what is due.
# Nothing follows an end.
_ROWS: dict[State, dict[Event, tuple[State, tuple[str, str] | None, tuple[Do, ...]]]] = {
    state: dict.fromkeys(Event, (state, None, ())) if state in ENDS else {} for state in State
}
for (_state, _event), _row in TABLE.items():
    _ROWS[_state][_event] = (_row.state, LEG_ENDS.get(_event), _due(_state, _row))
