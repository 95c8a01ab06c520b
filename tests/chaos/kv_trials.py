"""Randomized trials of KV transfer: two sources, two sinks, random requests, and one kind of fault.

python -m tests.chaos.kv_trials --trials 10000 --transport inproc,shm,tcp,lanes [--seed 0]

The transport `lanes` is tcp with parallel connections. `batches` is tcp with the native pump (C
code), which moves many small pieces at a time.

A trial depends only on its random seed. In every trial

- a fetch that ends as LANDED has exactly the offered bytes
- blocks are not written after they were returned to the engine
- every offer and every fetch ends once, with a reason
- no block stays reserved
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvContent, KvOrder
from kvtransfer.protocol.outcomes import OutcomeKind
from kvtransfer.transfer.handles import Landing, TransferHandle
from kvtransfer.transport_interface import Transport
from kvtransfer.transports.inproc import Inproc, InprocWire, WireConditions
from kvtransfer.transports.stream import inbound, outbound
from kvtransfer.util.clock import Clock, ThreadClock, VirtualClock
from tests.chaos.kv_faults import FaultProbabilities, FaultyTransport, Proxy
from tests.chaos.kv_trial_engine import BASE, BLOCKS, TrialEngine

FAULTS = (
    "none",
    "freeze source",
    "freeze sink",
    "kill source",
    "kill sink",
    "stall",
    "spoil bytes",
    "truncate",
    "repeat windows",
    "delay windows",
    "lose windows",
    "replay windows",
    "sever",
    "spoil messages",
    "repeat messages",
    "lose messages",
    "delay messages",
    "steal blocks",
)
STREAM_FAULTS = ("spoil bytes", "truncate", "sever", "stall")  # injected by a proxy between agents


@dataclass
class Outcome:
    seed: int
    transport: str
    fault: str
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


class Trial:
    def __init__(self, seed: int, transport: str, pace: float = 1.0) -> None:
        self.pace = pace
        self.rng = Random(seed)
        self.transport = transport
        self.fault = self.rng.choice(FAULTS)
        self.virtual = transport == "inproc"
        self.clock: VirtualClock | ThreadClock = (
            VirtualClock() if self.virtual else ThreadClock("trial")
        )
        self.wire = InprocWire(self.clock, self.weather(), Random(seed + 1))
        self.proxies: list[Proxy] = []
        self.to_come = 0
        self.undisturbed: list[tuple[TrialEngine, str]] = []
        self.inner: list[Transport] = []
        # A longer time span is affordable only if time is simulated.
        self.span_s = 0.4 if self.virtual else 0.05 * pace
        self.sources = [self.engine("p0", seed), self.engine("p1", seed)]
        self.sinks = [self.engine("d0", seed), self.engine("d1", seed)]
        self.engines = [*self.sources, *self.sinks]
        for engine in self.engines:
            engine.agent.open(engine)
            engine.expected = self.expected
            engine.reuse(engine.free[:])
            engine.free = list(range(BLOCKS))

    def weather(self) -> WireConditions:
        probability = self.rng.choice([0.02, 0.1, 0.5])
        faults = {
            "spoil bytes": WireConditions(corrupt=probability),
            "truncate": WireConditions(truncate=probability),
            "repeat windows": WireConditions(duplicate=probability, delay_s=0.1),
            "delay windows": WireConditions(delay=probability, delay_s=0.1),
            "sever": WireConditions(sever=probability / 4),
        }
        speed = self.rng.choice([None, 1e5, 1e6])
        calm = faults.get(self.fault, WireConditions())
        latency_s, fence_s = self.rng.choice([0.0, 0.001, 0.01]), self.rng.choice([0.0, 0.01, 0.1])
        return msgspec.structs.replace(
            calm, latency_s=latency_s, fence_s=fence_s, bytes_per_s=speed
        )

    def dice(self) -> FaultProbabilities:
        probability, late_s = self.rng.choice([0.01, 0.05, 0.3]), self.rng.choice([0.01, 0.1])
        return {
            "spoil messages": FaultProbabilities(spoil_message=probability),
            "repeat messages": FaultProbabilities(repeat_message=probability),
            "lose messages": FaultProbabilities(lose_message=probability),
            "delay messages": FaultProbabilities(delay_message=probability, late_s=late_s),
            "repeat windows": FaultProbabilities(repeat_window=probability),
            "lose windows": FaultProbabilities(lose_window=probability),
            "delay windows": FaultProbabilities(delay_window=probability, late_s=late_s),
            "replay windows": FaultProbabilities(replay_window=probability, late_s=late_s * 3),
        }.get(self.fault, FaultProbabilities())

    def engine(self, name: str, seed: int) -> TrialEngine:
        layout = msgspec.structs.replace(
            BASE, tp=self.rng.choice([1, 2, 4]), block_tokens=self.rng.choice([8, 16, 32])
        )
        # This has a random generator of its own, so that every seed still draws the same faults.
        # Shared memory and RDMA need the blocks as the outermost dimension.
        if self.transport not in ("shm", "rdma") and Random(f"{seed} {name}").random() < 0.4:
            layout = msgspec.structs.replace(
                layout, order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=BLOCKS
            )
        clock: Clock = self.clock
        if self.virtual:
            inner: Transport = Inproc(self.wire)
            clock = inner.agent_clock  # type: ignore[attr-defined]
        else:
            from tests.contract.kvtransfer.links import make

            inner = make(self.transport, self.wire, self.pace)
        self.inner.append(inner)
        dice = self.dice()
        faulty = (
            FaultyTransport(inner, dice, Random(self.rng.random()), clock)
            if dice != FaultProbabilities()
            else inner
        )
        budget_bytes = (64 if self.transport == "batches" else 6) << 10
        return TrialEngine(
            name, layout, [faulty], clock, self.rng.randrange(1 << 30), self.pace, budget_bytes
        )

    def expected(self, name: str) -> NDArray[np.uint8] | None:
        return next(
            (source.offers[name].content for source in self.sources if name in source.offers), None
        )

        # ---- what happens

    def run(self) -> list[str]:
        requests = self.rng.randrange(2, 7)
        for number in range(requests):
            self.request(f"r{number}")
        self.breakage()
        # With long leases, unclaimed offers end with their agent instead of expiring.
        self.settled(
            6.0 if self.virtual else 8.0 * self.pace,
            self.quiet if self.pace == 1 else self.all_taken,
        )
        for engine in self.engines:
            if not engine.dead:
                engine.is_over = True
                engine.agent.begin_close()
        self.settled(2.0 * self.pace, self.quiet)
        self.rest(0.15 if self.virtual else 0.01)
        for engine in self.engines:
            engine.check()
        for sink, name in self.undisturbed:
            request, offered = sink.landings.get(name), self.expected(name)
            if (
                request is not None
                and offered is not None
                and (request.end is None or request.end.kind is not OutcomeKind.LANDED)
            ):
                sink.wrong.append(f"{name} was left alone and ended {request.end}")
        self.leave()
        return [f"{engine.name}: {wrong}" for engine in self.engines for wrong in engine.wrong]

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        self.to_come += 1

        def make() -> None:
            try:
                call()
            finally:
                self.to_come -= 1

        self.clock.call_at(self.clock.now() + seconds, make)

    def moment(self, share: float = 1.0) -> float:
        return self.rng.random() * self.span_s * share

    def request(self, name: str) -> None:
        rng = self.rng
        source, sink = rng.choice(self.sources), rng.choice(self.sinks)
        tokens = rng.randrange(1, 120)
        wanted = rng.randrange(1, tokens + 1) if rng.random() < 0.2 else tokens
        skip = rng.randrange(wanted) if rng.random() < 0.3 else 0
        ttl_s = rng.choice([0.02, self.span_s / 2, *[2.0 * self.pace] * 5])
        timeout_s = rng.choice(
            [self.span_s / 3, *(seconds * self.pace for seconds in (1.0, 1.5, 2.0, 2.0))]
        )
        layered, pull = rng.random() < 0.4, rng.random() < 0.5
        offered_at, asked_after = self.moment(), self.moment(0.3)
        cancel, revoke = (self.moment(1.5) if rng.random() < 0.3 else None for _ in range(2))
        thief = self.moment() if rng.random() < 0.3 else None
        if (
            self.virtual
            and self.fault == "none"
            and None is cancel is revoke is thief
            and min(ttl_s, timeout_s) >= 1
        ):
            self.undisturbed.append((sink, name))
        layers_at = sorted(self.moment(0.6) for _ in range(BASE.layers))
        address = self.address_of(source)

        def take(ticket: str | None) -> None:
            if (
                not sink.dead
                and (landing := sink.take(address, name, wanted, skip, ticket, timeout_s))
                and cancel is not None
            ):
                self.at(cancel, landing.cancel)

        def give() -> None:
            offer = None if source.dead else source.give(name, tokens, ttl_s, layered)
            if offer is None:
                return
            for layers, when in enumerate(layers_at, 1):
                self.at(when, lambda layers=layers: offer.mark_ready(layers))  # type: ignore[misc]
            if revoke is not None:
                self.at(revoke, offer.revoke)
            if pull:
                self.at(asked_after, lambda: take(offer.ticket))
            if thief is not None:
                other = next(sink_ for sink_ in self.sinks if sink_ is not sink)
                self.at(
                    thief,
                    lambda: (
                        other.dead or other.take(address, name, wanted, 0, offer.ticket, timeout_s)
                    ),
                )

        self.at(offered_at, give)
        if not pull:
            self.at(self.moment(), lambda: take(None))

    def address_of(self, source: TrialEngine) -> str:
        from tests.contract.kvtransfer.links import OVER_TCP

        if self.transport not in OVER_TCP or self.fault not in STREAM_FAULTS:
            return source.agent.address
        proxy = Proxy(source.agent.address, Random(self.rng.random()))
        self.proxies.append(proxy)
        return proxy.address

    def breakage(self) -> None:
        # Inject the trial's fault, unless it consists of the network's or links' probabilities.
        kind, when, back = self.fault, self.moment(), self.rng.choice([0.03, 0.1, 0.4])
        victims = self.sources if "source" in kind else self.sinks
        victim = self.rng.choice(victims if "source" in kind or "sink" in kind else self.engines)
        if kind.startswith("kill"):
            self.at(when, lambda: self.kill(victim))
        elif self.virtual and (kind.startswith("freeze") or kind == "stall"):
            stop, go = (
                (self.wire.freeze, self.wire.thaw)
                if kind.startswith("freeze")
                else (self.wire.stall, self.wire.unstall)
            )
            self.at(when, lambda: stop(victim.agent.address))
            self.at(when + back, lambda: go(victim.agent.address))
        if kind == "steal blocks":
            for source in self.sources:
                self.at(when, source.steal)
        for proxy in self.proxies:
            if kind == "stall":
                self.at(when, proxy.stall)
                self.at(when + back, proxy.flow)
            elif kind in ("truncate", "sever"):
                self.at(when, proxy.sever)
            else:
                proxy.spoil(self.rng.choice([0, 1, 1, 2]))
                self.at(when, lambda proxy=proxy: proxy.spoil(2))  # type: ignore[misc]
        if (
            not self.virtual
            and not self.proxies
            and kind in ("sever", "stall", "freeze source", "freeze sink")
        ):
            self.at(when, lambda: self.hang_up(victim))

    def kill(self, engine: TrialEngine) -> None:
        # Stop an engine as SIGKILL would: its links break, and it does nothing any more.
        engine.dead = True
        if self.virtual:
            self.wire.kill(engine.agent.address)
        else:
            engine.agent._link_manager.close()
            self.inner[self.engines.index(engine)].close()

    def hang_up(self, engine: TrialEngine) -> None:
        for link in list(engine.agent._link_manager._peer_links):
            link.close()

            # ---- time

    def settled(self, within_s: float, enough: Callable[[], bool]) -> None:
        if isinstance(self.clock, VirtualClock):
            self.clock.run(within_s, enough)
            return
        deadline = time.monotonic() + within_s
        while not enough() and time.monotonic() < deadline:
            time.sleep(0.002 * self.pace)

    def quiet(self) -> bool:
        return self.all_taken() and all(handle.outcome for handle in self.handles())

    def all_taken(self) -> bool:
        return not self.to_come and all(
            handle.outcome for handle in self.handles() if isinstance(handle, Landing)
        )

    def handles(self) -> list[TransferHandle]:
        return [
            handle
            for engine in self.engines
            if not engine.dead
            for handle in list(engine.handles.values())
        ]

    def rest(self, seconds: float) -> None:
        if isinstance(self.clock, VirtualClock):
            self.clock.run(seconds)
        else:
            time.sleep(seconds)

    def leave(self) -> None:
        for engine in self.engines:
            if not engine.dead:
                engine.agent.finish_close()
        for proxy in self.proxies:
            proxy.close()
        if isinstance(self.clock, ThreadClock):
            self.clock.close()
        for engine in self.engines:
            for region in engine.regions:
                region.close()


def trial(seed: int, transport: str, pace: float = 1.0) -> Outcome:
    world = Trial(seed, transport, pace)
    outcome = Outcome(seed, transport, world.fault, world.run())
    for engine in world.engines:
        for request in (*engine.offers.values(), *engine.landings.values()):
            if request.end is not None:
                side = "offer" if request.content is not None else "landing"
                outcome.ends[f"{side} {request.end.kind} {request.end.reason}"] += 1
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials", type=int, default=10_000, help="number of trials (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="number of the first trial, which is also its random seed; use it to repeat a "
        "failed trial",
    )
    parser.add_argument(
        "--transport",
        default="inproc,shm,tcp,lanes",
        help="transports to test in turn, separated by commas",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=4,
        help="number of processes that run trials at the same time (default: %(default)s)",
    )
    chosen = parser.parse_args()
    names = chosen.transport.split(",")
    tasks = [
        (seed, names[seed % len(names)]) for seed in range(chosen.seed, chosen.seed + chosen.trials)
    ]
    began, ends, faults, wrong = time.monotonic(), Counter[str](), Counter[str](), []
    with multiprocessing.get_context("spawn").Pool(chosen.jobs, maxtasksperchild=500) as pool:
        for outcome in pool.imap_unordered(_trial, tasks, chunksize=4):
            ends.update(outcome.ends)
            faults[f"{outcome.transport}: {outcome.fault}"] += 1
            if outcome.wrong:
                wrong.append(outcome)
                print(
                    f"WRONG seed {outcome.seed} {outcome.transport} ({outcome.fault}): {outcome.wrong}",
                    flush=True,
                )
    for title, counts in (("trials", faults), ("ends", ends)):
        print(f"{title}:")
        for what, count in sorted(counts.items()):
            print(f"  {count:7d}  {what}")
    print(f"{chosen.trials} trials in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    raise SystemExit(1 if wrong else 0)


@contextmanager
def small_batches() -> Iterator[None]:
    """Let the native pump (C code that moves KV bytes) combine pieces of any size in one call.

    Usually it combines only large ones. This applies to the whole process.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (inbound, outbound):
            patch.setattr(module, "LEAST_BYTES", 1)
        patch.setattr(outbound, "_STAGED_BYTES", 0)
        yield


def _trial(task: tuple[int, str]) -> Outcome:
    try:
        with small_batches() if task[1] == "batches" else nullcontext():
            return trial(*task)
    except Exception as broken:
        return Outcome(*task, "?", ["".join(traceback.format_exception(broken)[-6:])])


if __name__ == "__main__":
    main()
