"""One attempt of a pair at one request: two booked places, two legs, and the table of life.py between them.

Legs only tell what happened to them; what follows stands in the table and is carried out here, one event at a time.
Whatever happens, both places are given back, both connections are closed or back in their pools, and KV that nobody
will read is freed. What the legs' requests and answers say is words.py's.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError, TimerHandle
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType

from gateway import legs
from gateway.attempts import retry_now
from gateway.endpoints import Booking
from gateway.errand import Landing, landing
from gateway.relay import Relay, UpstreamBroke
from gateway.split.bootstrap import Query
from gateway.split.inbox import Inbox
from gateway.split.leg import Leg
from gateway.split.life import ENDS, LEG_ENDS, TABLE, Act, Event, State
from gateway.split.words import Words, Work, one_token
from kvtransfer.dialects import Finished, Handover, Needs, Order, Unusable, read_answer
from policies import run
from policies.model import Ask
from policies.split import Pair

log = logging.getLogger("penstock")

# A decoder answers so when it could not load the KV (kv_load_failure_policy: fail): whose fault that was, nobody knows.
KV_FAILURES = frozenset({"status_500", "engine_error"})


class PairAttempt:
    """run() it once. Afterwards `suspects` names those who should not be tried again, `recompute` whether the whole
    request had better be computed in one place."""

    __slots__ = (
        *("_bug", "_catching_up", "_decode", "_decode_place", "_events", "_finished", "_handoffs", "_handover"),
        *("_number", "_pair", "_prefill", "_prefill_place", "_problem", "_query", "_refused", "_inbox", "_timer"),
        *("_waiting", "_words", "_work", "_x", "recompute", "state", "suspects"),
    )

    def __init__(self, work: Work, pair: Pair) -> None:
        endpoints, request = work.gateway.endpoints, work.call.request
        self._work, self._x, self._pair = work, work.x, pair
        self._handoffs = work.gateway.handoffs
        self._events: deque[Event] = deque()
        self._waiting: Landing | None = None
        self._catching_up = False
        self._bug: Exception | None = None
        self._timer: TimerHandle | None = None
        self._query: Query | None = None
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._inbox: Inbox | None = None
        self._handover: Handover | None = None
        self._finished: Finished | None = None
        self._refused: Relay | None = None
        self._problem: UpstreamBroke | None = None
        self.state = State.BOOKED
        self.suspects: list[str] = []
        self.recompute = False
        self._prefill_place: Booking | None = endpoints.book(pair.prefill, one_token(request), work.fingerprint)
        self._decode_place = endpoints.reserve(pair.decode, request, work.fingerprint)
        work.record.predicted_ttft_s = self._handoffs.expected_s(pair, self._prefill_place.place.predicted_ttft_s)
        self._number = self._handoffs.number()

    async def run(self, ask: Ask) -> UpstreamBroke | None:
        """None when the client has been answered, whatever the answer; else what broke. `ask` led to the pair."""
        work, prefill = self._work, self._pair.prefill
        try:
            self._words = Words(work, prefill.candidate.endpoint, self._number)
            self._x.booked(work.route.room, ask, prefill)
            self._post(self._start())
            if self.state not in ENDS:
                self._waiting = landing(self._handoffs.outbox.loop)
                await self._waiting
            if self._bug is not None:
                raise self._bug
        except CancelledError:
            self._post(Event.CLIENT_GONE)
            raise
        finally:
            self._leave()
        return self._problem if self.state is State.FAILED else None

    def _start(self) -> Event:
        dialect, known = self._work.split.dialect, self._words.terms.identity is not None
        if dialect.order is Order.SEQUENTIAL or (dialect.needs is Needs.FIRST_ANSWER and not known):
            return Event.START_PREFILL
        return Event.START_ASKING if dialect.needs is Needs.QUERY and not known else Event.START_BOTH

    # Events

    def _post(self, event: Event) -> None:
        """Something has happened. What follows is done at once, in the callback that brought the news; the line, which
        only waits for the end, goes on when it has come."""
        if self._catching_up:
            self._events.append(event)
            return
        self._catching_up = True
        try:
            self._catch_up(event)
        except Exception as bug:  # it must not end in the callback of a leg, with the line waiting for ever
            self._bug, self.state = bug, State.FAILED
        finally:
            self._catching_up = False
        if self.state in ENDS and self._waiting is not None and not self._waiting.done():
            self._waiting.land()

    def _catch_up(self, event: Event) -> None:
        """The one interpreter of the table."""
        while self.state not in ENDS:
            before, (self.state, end, acts) = self.state, _ROWS[self.state, event]
            if self.state is not before and (self._timer is not None or self.state is State.TRANSFERRING):
                self._enter()
            if end is not None:
                self._handoffs.count(end)
            for act in acts:
                act(self)
            if not self._events:
                return
            event = self._events.popleft()

    def _enter(self) -> None:
        """Fetching KV is not watched by upstream's sweep: it has a timer of its own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is State.TRANSFERRING:
            seconds = self._work.split.transfer_timeout_s
            self._timer = self._handoffs.outbox.loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        if self._x.committed:
            return  # it flows: what the relay does not know for a token is one all the same
        self._problem = UpstreamBroke("transfer_timeout", f"{self.state} for too long")
        self._post(Event.OVERDUE)

    # Prefill

    def _ask(self) -> None:
        bootstrap = self._words.terms.bootstrap
        assert bootstrap is not None
        self._query = self._handoffs.bootstraps.ask(bootstrap, self._told)

    def _stop_asking(self) -> None:
        if self._query is not None:
            self._query.leave(self._told)

    def _told(self, problem: UpstreamBroke | None, page: bytes) -> None:
        found = self._work.split.dialect.identify(page)
        if problem is None and found:
            self._words.introduced(found)
            self._post(Event.KNOWN)
        else:
            self._problem = UpstreamBroke("bootstrap_failed", f"no engine id from the bootstrap server: {problem}")
            self._post(Event.PREFILL_BROKE)

    def _send_prefill(self) -> None:
        place = self._prefill_place
        assert place is not None
        head, body = self._words.prefill(place)
        inbox = self._inbox = Inbox(keep=self._work.split.dialect.reads_answer)
        relay = Relay(b"", http_1_0=True)
        self._prefill = Leg(place.upstream, head, body, relay, inbox, self._prefilled)
        self._work.record.prefill_sent_at = now = monotonic()
        self._x.sent_at = self._x.sent_at or now
        self._prefill.start()

    def _prefilled(self, problem: UpstreamBroke | None) -> None:
        assert self._prefill is not None
        self._prefill.release()
        relay = self._prefill.relay
        if problem is None and relay.refused:
            problem = self._judged(relay)
        elif problem is None and relay.failed_in_stream:
            problem = UpstreamBroke("engine_error", "error event in the stream")
        if problem is not None:
            self._problem = problem
            self._post(Event.PREFILL_BROKE)
        elif self._refused is not None:
            self._post(Event.PREFILL_REFUSED)
        else:
            self._post(self._computed(relay))

    def _judged(self, relay: Relay) -> UpstreamBroke | None:
        """An engine's refusal: kept for the client, or trouble of the engine's own."""
        try:
            status = legs.refusal(relay)
        except UpstreamBroke as broke:
            return broke.with_traceback(None)  # that leads back here, and so to whoever keeps it: a cycle
        if self._x.committed:
            return UpstreamBroke(f"status_{status}", f"the engine answered {status} after its twin had begun")
        self._refused = relay
        return None

    def _computed(self, relay: Relay) -> Event:
        """The prompt is computed: its place is free again, and its KV waits, or not."""
        self._work.record.prefilled_at = monotonic()
        if self._prefill_place is not None:
            self._prefill_place.first_token()
            self._prefill_place.served(relay.usage)
            self._leave_prefill()
        if not self._work.split.dialect.reads_answer:
            return self._handed_over()
        assert self._inbox is not None
        meaning = self._words.meaning(read_answer(self._inbox.body), alone=self._decode is None)
        if isinstance(meaning, Finished):
            self._finished = meaning
            return Event.FINISHED
        if isinstance(meaning, Unusable):
            return self._unusable(meaning)
        self._handover = meaning or self._handover
        return self._handed_over()

    def _handed_over(self) -> Event:
        self._decode_place.handed_over()
        return Event.PREFILLED

    def _unusable(self, answer: Unusable) -> Event:
        log.warning(
            "endpoint %s handed over nothing usable: %s", self._pair.prefill.candidate.endpoint.name, answer.why
        )
        if not self._x.committed or self.state is State.DECODING:
            return Event.UNUSABLE
        self._problem = UpstreamBroke("prefill_unusable", answer.why)
        return Event.PREFILL_BROKE

    # Decode

    def _send_decode(self) -> None:
        if self._handover is None:
            found = self._work.split.dialect.decode(self._words.terms, None)
            assert isinstance(found, Handover), found  # what it needs was learnt before
            self._handover = found
        self._decode_with(self._handover)

    def _send_whole(self) -> None:
        self._decode_place.recompute()
        self._decode_with(None)

    def _decode_with(self, handover: Handover | None) -> None:
        x, place = self._x, self._decode_place
        head, body = self._words.decode(place, handover)
        relay = self._words.relay(place.endpoint, handover)
        relay.on_first = self._first_token if handover is None else self._first_token_by_handover
        x.booking, x.relay = place, relay
        x.sent = self._decode = Leg(place.upstream, head, body, relay, self._work.client, self._decoded)
        self._work.record.handed_over_at = now = monotonic()
        x.sent_at = x.sent_at or now
        self._decode.start(lambda: self._post(Event.SENT))

    def _first_token(self) -> None:
        self._x.first_token()
        self._work.body.forget()
        self._post(Event.FIRST_TOKEN)

    def _first_token_by_handover(self) -> None:
        self._handoffs.travelled(self._pair, self._work.call.request.prompt_tokens)
        self._first_token()

    def _decoded(self, problem: UpstreamBroke | None) -> None:
        assert self._decode is not None
        relay, place = self._decode.relay, self._decode_place
        if problem is None and relay.refused:
            problem = self._judged(relay)
        if problem is not None:
            self._problem = problem
            self._post(Event.UNREACHED if self._decode.sent_at is None else Event.DECODE_BROKE)
        elif self._refused is not None:
            self._post(Event.DECODE_REFUSED)
        else:
            if relay.failed_in_stream:
                self._x.interrupted("engine_error")
                place.failed(UpstreamBroke("engine_error", "error event in the stream"))
            else:
                self._x.status = 200
                place.served(relay.usage)
            self._post(Event.DECODED)

    def _other_decode(self) -> None:
        """The KV waits for whoever asks with the handoff, and this one never reached a decoder: give it to another."""
        work, x, problem = self._work, self._x, self._problem
        assert problem is not None
        x.retries += self.suspects  # it stays on record, whoever answers in the end
        self.suspects = []
        group = next(each for each in work.split.pools.groups if self._pair.decode.candidate in each.decodes)
        others = [each for each in group.decodes if each is not self._pair.prefill.candidate]
        ask = work.gateway.endpoints.ask(work.call.request, work.fingerprint, x.retries)
        pick = run.pick(work.split.splitter.decode, ask, others)
        if pick is None or not retry_now(work.gateway, x, problem):  # over budget a pair waits its turn and begins anew
            self._post(Event.NOBODY)
            return
        self._decode_place.__exit__()
        self._decode_place = work.gateway.endpoints.reserve(pick, work.call.request, work.fingerprint)
        self._pair = Pair(self._pair.prefill, pick)
        x.pick = pick
        self._send_decode()

    # What else is due

    def _answer(self) -> None:
        """The prefill answer goes through a relay like any other, as if the engine had been asked for just this."""
        assert self._finished is not None
        x, client = self._x, self._work.client
        x.pick, x.booking = self._pair.prefill, None
        relay = x.relay = self._words.relay(self._pair.prefill.candidate.endpoint, None)
        relay.on_first = x.first_token
        client.write(relay.feed(self._words.finished(self._finished), monotonic()))
        x.status = 200

    def _pass_on(self) -> None:
        assert self._refused is not None
        legs.pass_on(self._x, self._work.client, self._refused)

    def _close_prefill(self) -> None:
        if self._prefill is not None and not self._prefill.over:
            self._prefill.close()
            self._handoffs.count(("prefill", "closed"))

    def _close_decode(self) -> None:
        if self._decode is not None and not self._decode.over:
            self._decode.close()
            self._handoffs.count(("decode", "closed"))

    def _call_off_prefill(self) -> None:
        """An engine that is told to abort finishes its step first, and then holds KV that nobody knows of. So its
        answer is waited for as long as a step may take; then it is called off, and what crosses that is still read."""
        leg, inbox = self._prefill, self._inbox
        if leg is None or inbox is None or leg.over or leg.sent_at is None:
            return  # it was still connecting: _leave() closes it
        step_s = self._handoffs.figures(self._pair).step_s
        leg.close_in(2 * step_s, self._too_late)
        self._handoffs.outbox.loop.call_later(step_s, inbox.call_off)
        self._handoffs.count(("prefill", "closed"))

    def _too_late(self, problem: UpstreamBroke | None) -> None:
        assert self._prefill is not None
        assert self._inbox is not None
        if problem is not None or self._prefill.relay.refused:
            return
        meaning = self._words.meaning(read_answer(self._inbox.body), alone=True)
        if isinstance(meaning, Handover):
            self._give_up(meaning)

    def _free_by_decode(self) -> None:
        """A decoder that was cut off before its engine saw the handoff, or before P was done, would tell P nothing."""
        leg, now = self._decode, monotonic()
        if leg is None or leg.over:
            return
        if not self._kv_may_stay():
            leg.close()
        elif leg.sent_at is None:
            leg.close()
            self._give_up(self._handover)
        else:
            since = leg.sent_at if self._work.record.prefilled_at is not None else now
            leg.close_in(since + self._handoffs.figures(self._pair).seen_s - now)
        self._handoffs.count(("decode", "closed"))

    def _kv_may_stay(self) -> bool:
        """Whether P can be left with KV that only a decoder frees. If not, D would wait for what nobody sends."""
        prefill = self._prefill
        return prefill is not None and prefill.sent_at is not None and not self._work.split.dialect.abort_frees

    def _give_up(self, handover: Handover | None) -> None:
        if handover is not None:
            words = self._words.farewell(self._decode_place, handover)
            self._handoffs.give_up(self._decode_place.upstream, words, "client_gone")

    def _blame_prefill(self) -> None:
        """Only the guilty leg: its place ends with the failure, its engine may have been restarted."""
        assert self._problem is not None
        name = self._pair.prefill.candidate.endpoint.name
        if self._prefill_place is not None:
            self._prefill_place.failed(self._problem)
        self._handoffs.forget(name)
        self.suspects.append(name)

    def _blame_decode(self) -> None:
        assert self._problem is not None
        if self._handover is not None and self._problem.kind in KV_FAILURES and not self._x.committed:
            self._blame_nobody()
        else:
            self._decode_place.failed(self._problem)
            self.suspects.append(self._pair.decode.candidate.endpoint.name)

    def _blame_nobody(self) -> None:
        """It may have been either. A decoder that can do without a prefiller is asked again and shows whether it was;
        one that cannot is held to account: success with others clears an innocent one, and a broken one must leave."""
        name = self._pair.prefill.candidate.endpoint.name
        self.recompute = True
        self._handoffs.forget(name)  # the decoder may have been told of the engine that it was before a restart
        self.suspects.append(name)
        if not self._work.split.dialect.decode_alone:
            assert self._problem is not None
            self._decode_place.failed(self._problem)
            self.suspects.append(self._pair.decode.candidate.endpoint.name)

    # The end

    def _leave_prefill(self) -> None:
        if self._prefill_place is not None:
            self._prefill_place.__exit__()
            self._prefill_place = None

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stop_asking()
        self._close_prefill()
        self._close_decode()
        self._leave_prefill()
        self._decode_place.__exit__()
        self._handoffs.give_back(self._number)
        self._handoffs.ended(self._pair, self.state, self._work.record, self._x.relay)


_DO: Mapping[Act, Callable[[PairAttempt], None]] = MappingProxyType(
    {
        Act.ASK: PairAttempt._ask,
        Act.STOP_ASKING: PairAttempt._stop_asking,
        Act.SEND_PREFILL: PairAttempt._send_prefill,
        Act.SEND_DECODE: PairAttempt._send_decode,
        Act.SEND_WHOLE: PairAttempt._send_whole,
        Act.OTHER_DECODE: PairAttempt._other_decode,
        Act.ANSWER: PairAttempt._answer,
        Act.PASS_ON: PairAttempt._pass_on,
        Act.CLOSE_PREFILL: PairAttempt._close_prefill,
        Act.CLOSE_DECODE: PairAttempt._close_decode,
        Act.CALL_OFF_PREFILL: PairAttempt._call_off_prefill,
        Act.FREE_BY_DECODE: PairAttempt._free_by_decode,
        Act.BLAME_PREFILL: PairAttempt._blame_prefill,
        Act.BLAME_DECODE: PairAttempt._blame_decode,
        Act.BLAME_NOBODY: PairAttempt._blame_nobody,
    }
)

# The table with everything looked up once: the next state, the leg's end that the event is, and what is due.
_ROWS: Mapping[tuple[State, Event], tuple[State, tuple[str, str] | None, tuple[Callable[[PairAttempt], None], ...]]] = (
    MappingProxyType(
        {
            (state, event): (row.state, LEG_ENDS.get(event), tuple(_DO[act] for act in row.acts))
            for (state, event), row in TABLE.items()
        }
    )
)
