"""Runs several hundred KV transfers with random faults, in which no wrong KV may be accepted.

Bugs that are built in on purpose must be detected by these trials.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import repeat

import pytest

from kvtransfer.transfer import receive_tracker, send_queue, sink
from kvtransfer.transfer.send_credits import SendCredits
from kvtransfer.transfer.sink import TransferSink
from kvtransfer.transport_interface import WindowVerdict
from kvtransfer.transports import inproc
from tests.chaos.kv_trials import FAULTS, Trial, small_batches, trial
from tests.duration_limits import pace


@pytest.mark.parametrize(
    ("transport", "seeds"),
    [
        ("inproc", range(240)),
        ("shm", range(24)),
        ("tcp", range(24, 48)),
        ("lanes", range(48, 72)),
        ("tls", range(72, 84)),
        ("tcp-python", range(84, 100)),
        ("batches", range(100, 124)),
    ],
)
def test_under_any_fault_nothing_wrong_lands_and_nothing_stays_reserved(
    transport: str, seeds: range
) -> None:
    # Trials on real sockets mostly wait, so several run at once.
    with (
        small_batches() if transport == "batches" else nullcontext(),
        ThreadPoolExecutor(1 if transport == "inproc" else 6) as pool,
    ):
        paces = repeat(1.0 if transport == "inproc" else pace())
        outcomes = list(pool.map(trial, seeds, repeat(transport), paces))
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    ends = {end for outcome in outcomes for end in outcome.ends}
    assert {"landing landed landed", "offer landed landed"} <= ends
    if transport == "inproc":
        assert {outcome.fault for outcome in outcomes} == set(FAULTS)
        assert len(ends) > 20


def believe_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransferSink.on_landed
    monkeypatch.setattr(
        TransferSink,
        "on_landed",
        lambda self, link, head, _, now: original(self, link, head, WindowVerdict.OK, now),
    )


def never_ask_for_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "_still_current", lambda *_: lambda: True)


def fence_without_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        inproc.InprocLink,
        "_fence",
        lambda link, transfer: link._end.owner.on_fenced(link, transfer),
    )


def give_blocks_back_before_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransferSink._end

    def early(book, reservation, *why, **how):  # type: ignore[no-untyped-def]
        commands = original(book, reservation, *why, **how)
        is_reserved = reservation.number in book._reservations
        return commands + book._resolve(reservation, why[-1]) if is_reserved else commands

    monkeypatch.setattr(sink.TransferSink, "_end", early)


def take_windows_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_tracker._Spans, "add", lambda *_: True)


def forget_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendCredits, "forget", lambda *_: 0)


@pytest.mark.parametrize(
    "mistake",
    [
        believe_every_window,
        never_ask_for_generations,
        fence_without_stopping,
        give_blocks_back_before_the_fence,
        take_windows_twice,
        forget_no_credit,
    ],
)
def test_an_injected_protocol_bug_is_detected(mistake, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    mistake(monkeypatch)
    assert any(trial(seed, "inproc").wrong for seed in range(400))


def test_a_request_that_comes_after_the_end_of_a_trial_keeps_no_blocks() -> None:
    world = Trial(3, "inproc")
    source, sink = world.sources[0], world.sinks[0]
    for engine in world.engines:
        engine.is_over = True
        engine.agent.begin_close()
    world.rest(0.2)
    assert source.give("late", 16, 1.0, False) is None
    assert sink.take(source.agent.address, "late", 16, 0, None, 1.0) is None
    source.check()
    sink.check()
    assert source.wrong == sink.wrong == []
    world.leave()
