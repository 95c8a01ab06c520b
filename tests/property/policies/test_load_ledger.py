"""Property tests of the load that is reserved at endpoints for requests.

After any order of events, all of it has been released, and the forecast of load is valid.
"""

from __future__ import annotations

from math import exp, isfinite

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.engine.kalman import MOST_CORRECTION
from policies.latency.expected_latency import backlog_s, tpot_s, ttft_s
from policies.load_ledger import LoadReservation, own_load, set_peer_load
from policies.routing_types import Request

OUTLOOK = (
    "prefill_s_per_token",
    "attention_s_per_pair",
    "fixed_ttft_s",
    "decode_s_per_token",
    "decode_s_per_sequence",
    "decode_s_per_context_token",
    "s_per_freed_kv_token",
)
COUNTS = (
    "in_flight",
    "answers",
    "prefill_tokens",
    "decode_tokens",
    "expected_tokens",
    "decoding",
    "kv_reserved",
)
PASSING = st.sampled_from([0.0, 0.001, 0.02, 0.3, 4.0, 500.0])


class Ledger(RuleBasedStateMachine):
    entries = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.load = EndpointLoad(0)
        scraped_load.record_scrape(self.load, None, None, None, 200_000, 0.5)
        self.now = 1.0
        self.open: set[LoadReservation] = set()
        self.outputs: dict[LoadReservation, int] = {}

    def teardown(self) -> None:
        for entry in list(self.open):
            entry.drop(self.now)
        load, timeline = self.load, self.load.timeline
        assert [getattr(load, name) for name in COUNTS] == [0] * len(COUNTS)
        assert (timeline.batch, timeline.kv_prompts, timeline.incoming_kv_tokens) == (0, 0, 0)
        assert (timeline.queued_tokens, list(timeline.queue)) == (0, [])
        assert timeline.context_base == 0

    @rule(
        target=entries,
        after=PASSING,
        prompt=st.integers(0, 150_000),
        share=st.floats(0, 1),
        output=st.integers(0, 5000),
        choices=st.integers(1, 4),
        handed=st.booleans(),
        told=st.booleans(),
    )
    def take(
        self,
        after: float,
        prompt: int,
        share: float,
        output: int,
        choices: int,
        handed: bool,
        told: bool,
    ) -> LoadReservation:
        self.now += after
        request = Request("id", "m", "t", prompt, output, choices=choices)
        entry = (load_ledger.reserve_decode if handed else load_ledger.reserve)(
            self.load, request, int(prompt * share), self.now, told
        )
        is_predicted = self.load.is_modelled and told
        assert (entry.predicted_ttft_s is None) == (handed or not is_predicted)
        assert (entry.predicted_tpot_s is None) == (not is_predicted)
        assert entry.predicted_tpot_s is None or isfinite(entry.predicted_tpot_s)
        self.open.add(entry)
        self.outputs[entry] = output
        return entry

    @rule(entry=entries, after=PASSING)
    def first_token(self, entry: LoadReservation, after: float) -> None:
        self.now += after
        entry.on_first_token(self.now)

    @rule(entry=entries, after=PASSING)
    def recompute(self, entry: LoadReservation, after: float) -> None:
        self.now += after
        entry.recompute_prompt(self.now)

    @rule(entry=entries, after=PASSING)
    def handed_over(self, entry: LoadReservation, after: float) -> None:
        self.now += after
        entry.on_kv_arrived(self.now)

    @rule(
        entry=consumes(entries),
        after=PASSING,
        tokens=st.none() | st.integers(0, 5000),
        again=st.booleans(),
    )
    def end(self, entry: LoadReservation, after: float, tokens: int | None, again: bool) -> None:
        self.now += after
        entry.finish(self.now, tokens)
        self.open.discard(entry)
        if again:
            entry.drop(self.now)
            entry.on_first_token(self.now)
            entry.recompute_prompt(self.now)

    @rule(
        after=PASSING,
        running=st.none() | st.integers(0, 300),
        waiting=st.none() | st.integers(0, 300),
        usage=st.none() | st.floats(0, 1),
    )
    def scrape(
        self, after: float, running: int | None, waiting: int | None, usage: float | None
    ) -> None:
        self.now += after
        scraped_load.record_scrape(self.load, running, waiting, usage, None, self.now)

    @rule(after=PASSING, believed=st.booleans())
    def believe(self, after: float, believed: bool) -> None:
        self.now += after
        load_ledger.set_modelled(self.load, believed, self.now)

    @invariant()
    def what_is_reserved_is_on_the_timeline_or_nothing_is(self) -> None:
        load, timeline = self.load, self.load.timeline
        assert set(load.reservations) == self.open
        if load.is_modelled:
            assert timeline.batch == sum(
                entry.sequences for entry in load.reservations if entry.is_decoding
            )
            assert timeline.incoming_kv_tokens == sum(
                entry.prompt_tokens for entry in load.reservations if entry.awaits_kv
            )
        else:
            assert (
                timeline.batch,
                timeline.kv_prompts,
                len(timeline.queue),
                timeline.completing,
            ) == (0, 0, 0, [])

    @invariant()
    def counts_are_never_negative(self) -> None:
        assert min(getattr(self.load, name) for name in COUNTS) >= 0
        assert self.load.in_flight == len(self.open)
        assert self.load.answers == sum(self.outputs[entry] > 1 for entry in self.open)
        assert self.load.timeline.queued_tokens >= 0

    @invariant()
    def the_outlook_is_a_row_of_finite_numbers(self) -> None:
        load = self.load
        assert all(0.0 <= getattr(load, name) < 1e6 for name in OUTLOOK)
        assert isfinite(load.prefill_done_at)
        assert load.free_kv_tokens <= 200_000 / load.timeline.kv_ratio
        for uncached, cached in ((1, 0), (8000, 0), (100_000, 30_000)):
            assert 0.0 < ttft_s(load, uncached, cached, self.now) < 1e9
        assert 0.0 < tpot_s(load, 1000) < 1e6
        assert 0.0 <= backlog_s(load, self.now) < 1e9

    @invariant()
    def corrections_are_bounded(self) -> None:
        belief = self.load.belief
        assert 0.0 <= belief.request_s <= 1.0
        assert 0.0 < self.load.timeline.kv_ratio <= 1.0
        for learnt in (belief.prompts, belief.decodes, belief.layers):
            assert all(
                exp(-MOST_CORRECTION) * 0.999 <= factor <= exp(MOST_CORRECTION) * 1.001
                for factor in learnt.factors
            )
        for speed in belief.speeds:
            assert (
                exp(-2 * MOST_CORRECTION) * 0.999
                <= speed.factor
                <= exp(2 * MOST_CORRECTION) * 1.001
            )
            assert speed.var >= 0.0


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


EVENT = st.tuples(st.integers(0, 4), st.integers(0, 30_000), st.integers(0, 500), st.booleans())


@given(st.lists(EVENT, max_size=40))
def test_the_counters_do_not_depend_on_modelling_and_reach_peer_gateways(
    events: list[tuple[int, int, int, bool]],
) -> None:
    loads = EndpointLoad(0), EndpointLoad(0)
    load_ledger.set_modelled(loads[1], False, 0.0)
    places: list[tuple[LoadReservation, ...]] = []
    for now, (kind, number, output, handed) in enumerate(events, start=1):
        if kind <= 1:
            take = load_ledger.reserve_decode if handed else load_ledger.reserve
            request = Request("id", "m", "t", number, output)
            places.append(tuple(take(load, request, number // 3, float(now)) for load in loads))
        elif places:
            for entry in places[number % len(places)]:
                if kind == 2:
                    entry.on_first_token(float(now))
                elif kind == 3:
                    entry.recompute_prompt(float(now))
                else:
                    entry.finish(float(now), output)
        assert [[getattr(load, name) for name in COUNTS] for load in loads[:1]] * 2 == [
            [getattr(load, name) for name in COUNTS] for load in loads
        ]
    elsewhere = EndpointLoad(0)
    set_peer_load(elsewhere, b"peer", own_load(loads[0]), 1.0)
    assert [getattr(elsewhere, name) for name in COUNTS] == [
        getattr(loads[0], name) for name in COUNTS
    ]


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 50_000)), min_size=1, max_size=20))
def test_the_queue_grows_with_every_reservation(prompts: list[tuple[int, int]]) -> None:
    load = EndpointLoad(0)
    for uncached, cached in prompts:
        before = load.prefill_done_at, ttft_s(load, 1000, 0, 5.0)
        load_ledger.reserve(load, Request("id", "m", "t", uncached + cached, 100), cached, 5.0)
        assert load.prefill_done_at > before[0]
        assert ttft_s(load, 1000, 0, 5.0) > before[1]
