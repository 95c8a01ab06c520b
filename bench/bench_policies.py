"""Measures how long routing decisions take, in microseconds: `python bench/bench_policies.py`

It prints three tables:

1. the parts of a routing decision
2. bookkeeping: reserving capacity at an endpoint for a request, and releasing it
3. the choice of an endpoint alone, for every registered policy

Each time is the lowest median of several rounds. Prompts have 4 bytes per token and begin with a
system prompt that every endpoint has cached. A "known" prompt continues a conversation that one
endpoint has cached. A "new" prompt is unknown after the system prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from policies import load_ledger, policy_registry
from policies.endpoint_load import EndpointLoad
from policies.latency.expected_latency import ttfts
from policies.load_ledger import LoadReservation
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.prefix_index import PrefixIndex
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, Endpoint, Request, RoutingQuery, Slo

SYSTEM_TOKENS, BYTES_PER_TOKEN = 1000, 4
PROMPTS, ROUNDS = 100, 5


def median_us(action: Callable[[int], object], texts: Sequence[bytes] = (b"",) * PROMPTS) -> float:
    """Return the median duration of action(0), action(1), ... in microseconds.

    There is one call for each text. The text is read once before the call, so that it is in the
    processor's caches, as in a gateway, where the parser has just read it.
    """
    spent = []
    for number, text in enumerate(texts):
        text.count(b"\0")
        begin = perf_counter()
        action(number)
        spent.append(perf_counter() - begin)
    return median(spent) * 1e6


class Bench:
    """Measures the parts of a routing decision: hash the prompt, look it up, choose an endpoint."""

    def __init__(self, tokens: int, endpoints: int) -> None:
        self.tokens, self.rng = tokens, Random(1)
        self.prints = Fingerprinter(self.rng.randbytes(32))
        self.index = PrefixIndex(256 << 20)
        self.policies = {
            name: policy_registry.build(name, {})
            for name in ("round_robin", "least_loaded", "prefix_aware")
        }
        self.candidates = [self.candidate(slot) for slot in range(endpoints)]
        self.system = self.rng.randbytes(SYSTEM_TOKENS * BYTES_PER_TOKEN)
        for slot in range(endpoints):
            self.index.set_capacity(slot, 10**9)
            self.index.insert(self.prints.fingerprint(b"salt", self.system), slot, SYSTEM_TOKENS)

    def candidate(self, slot: int) -> Candidate:
        load = EndpointLoad(slot)
        load.in_flight, load.prefill_tokens = self.rng.randrange(20), self.rng.randrange(20_000)
        load.decoding, load.decode_tokens = load.in_flight // 2, self.rng.randrange(100_000)
        load.kv_tokens, load.kv_reserved, load.prefill_done_at = (
            600_000.0,
            self.rng.randrange(500_000),
            2 * self.rng.random(),
        )
        load.running, load.waiting, load.kv_usage, load.scraped_at = 10, 2, 0.5, 0.9
        return Candidate(Endpoint(f"tp{slot}", "http://127.0.0.1:9000", "pool", "model"), load)

    def texts(self) -> list[bytes]:
        return [
            self.system + self.rng.randbytes((self.tokens - SYSTEM_TOKENS) * BYTES_PER_TOKEN)
            for _ in range(PROMPTS)
        ]

    def ask(self, cached: list[int]) -> RoutingQuery:
        return RoutingQuery(
            Request("id", "model", "tenant", self.tokens, 300), 1.0, self.rng, cached
        )

    def decide(self, fingerprint: Fingerprint) -> None:
        cached = self.index.match(fingerprint, self.tokens)
        picked = pick(self.policies["prefix_aware"], self.ask(cached), self.candidates)
        assert picked is not None
        self.index.insert(fingerprint, picked.candidate.load.slot, self.tokens)

    def measure_round(self) -> list[float]:
        texts, further_texts = self.texts(), self.texts()
        fingerprints: list[Fingerprint] = []
        new = median_us(lambda n: self.decide(self.prints.fingerprint(b"salt", texts[n])), texts)
        turns = [text[:-8] for text in texts]
        return [
            median_us(
                lambda n: fingerprints.append(self.prints.fingerprint(b"salt", further_texts[n])),
                further_texts,
            ),
            median_us(lambda n: self.index.match(fingerprints[n], self.tokens)),
            median_us(
                lambda n: self.index.insert(fingerprints[n], n % len(self.candidates), self.tokens)
            ),
            median_us(lambda n: self.index.match(fingerprints[n], self.tokens)),
            median_us(lambda n: pick(self.policies["round_robin"], self.ask([]), self.candidates)),
            median_us(lambda n: pick(self.policies["least_loaded"], self.ask([]), self.candidates)),
            median_us(
                lambda n: pick(
                    self.policies["prefix_aware"], self.ask([0, 100, 200, 300]), self.candidates
                )
            ),
            new,
            median_us(lambda n: self.decide(self.prints.fingerprint(b"salt", turns[n])), turns),
        ]


def print_picks(endpoints: int) -> None:
    """Print how long each registered policy takes to choose an endpoint for 8,000 prompt tokens.

    In the first column no endpoint has the prompt cached. In the second, a tenth of the endpoints
    have most of it cached.
    """
    bench, slo = Bench(8_000, endpoints), Slo("chat", 2.0, 0.05)
    prints = [bench.prints.fingerprint(b"salt", text) for text in bench.texts()]
    cold = [0] * endpoints
    warm = [6_800 if slot % 10 == 3 else 100 * (slot % 30) for slot in range(endpoints)]

    def ask(number: int, cached: list[int]) -> RoutingQuery:
        request = Request(f"{number}", "model", "tenant", 8_000, 300, slo=slo)
        return RoutingQuery(
            request, 1.0 + number / 1000, bench.rng, cached, frozenset(), prints[number]
        )

    for name in policy_registry.names():
        costs = []
        for cached in (cold, warm):
            asks = [ask(number, cached) for number in range(PROMPTS)]
            one = partial(pick, policy_registry.build(name, {}))
            costs.append(
                min(median_us(partial(decide, one, asks, bench.candidates)) for _ in range(ROUNDS))
            )
        print(f"{endpoints:3} ep, {name}".ljust(28), *(f"{cost:8.1f}" for cost in costs))


def decide(
    one: Callable[..., object],
    asks: Sequence[RoutingQuery],
    fleet: Sequence[Candidate],
    number: int,
) -> object:
    return one(asks[number], fleet)


class LedgerBench:
    """Measures how long it takes to reserve capacity for a request, and to predict its latency.

    About 0.1 us of each time is the cost of reading the clock.
    """

    BATCH = 20

    def __init__(self, endpoints: int, gap_s: float, prompt_tokens: int, believed: bool) -> None:
        """Prepare an endpoint that receives a request every `gap_s` seconds.

        prompt_tokens  length of each prompt
        believed       whether the gateway has already learned how fast the endpoint is
        """
        self.load = EndpointLoad(0)
        self.load.kv_tokens = 600_000
        load_ledger.set_modelled(self.load, believed, 0.0)
        self.gap_s = gap_s
        self.request = Request("id", "model", "tenant", prompt_tokens, 300)
        self.now = 1.0
        self.decoding: list[LoadReservation] = []
        self.entry: LoadReservation | None = None
        self.candidates = [
            Candidate(
                Endpoint(f"tp{slot}", "http://127.0.0.1:9000", "pool", "model"), EndpointLoad(slot)
            )
            for slot in range(endpoints)
        ]
        self.held = [100] * endpoints

    def reserve(self, _: int) -> None:
        self.now += 0.5 * self.gap_s
        self.entry = load_ledger.reserve(
            self.load, self.request, self.request.prompt_tokens // 5, self.now
        )

    def first_token(self, _: int) -> None:
        assert self.entry is not None
        self.now += 0.4 * self.gap_s
        self.entry.on_first_token(self.now)

    def finished(self, _: int) -> None:
        self.now += 0.1 * self.gap_s
        self.decoding.pop(0).finish(self.now, 100)

    def measure_round(self) -> list[float]:
        """Measure every kind of call to the load ledger once; return the microseconds of each kind.

        The order is: `reserve`, `first_token`, `finished`, and the prediction of the time to first
        token at all endpoints.
        """
        spent: list[list[float]] = [[], [], []]
        for _ in range(PROMPTS):
            for number, step in enumerate((self.reserve, self.first_token, self.finished)):
                if step == self.finished and len(self.decoding) <= self.BATCH:
                    continue
                begin = perf_counter()
                step(0)
                spent[number].append(perf_counter() - begin)
            assert self.entry is not None
            self.decoding.append(self.entry)
        prediction_us = median_us(lambda n: ttfts(self.candidates, self.held, 8000, self.now))
        return [*(median(seconds) * 1e6 for seconds in spent), prediction_us]


def print_ledger() -> None:
    print(
        "\nmicroseconds".ljust(23),
        *(name.rjust(12) for name in ("book", "first_token", "finished", "ttfts")),
    )
    for name, endpoints, gap_s, prompt_tokens, is_modelled in (
        ("counted only, 4 ep", 4, 0.35, 5000, False),
        ("3 a second, 4 ep", 4, 0.35, 5000, True),
        ("500 a second, 64 ep", 64, 0.002, 60, True),
    ):
        bench = LedgerBench(endpoints, gap_s, prompt_tokens, is_modelled)
        best = map(min, zip(*[bench.measure_round() for _ in range(4 * ROUNDS)], strict=True))
        print(name.ljust(22), *(f"{value:12.2f}" for value in best))


def main() -> None:
    columns = (
        "fingerprint",
        "match new",
        "insert new",
        "match known",
        "round_robin",
        "least_loaded",
        "prefix_aware",
        "all, new",
        "all, known",
    )
    print("microseconds".ljust(22), *(column.rjust(12) for column in columns))
    for endpoints in (4, 64):
        for tokens in (2_000, 8_000, 32_000, 100_000):
            bench = Bench(tokens, endpoints)
            best = map(min, zip(*[bench.measure_round() for _ in range(ROUNDS)], strict=True))
            print(
                f"{endpoints:3} ep, {tokens:7} tokens".ljust(22),
                *(f"{value:12.1f}" for value in best),
            )
    print_ledger()
    print("pick alone".ljust(28), *(column.rjust(8) for column in ("cold", "warm")))
    for endpoints in (4, 64):
        print_picks(endpoints)


if __name__ == "__main__":
    main()
