"""What `make overload` makes of what its clients saw, and that these see it rightly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from bench.load.overload_client import SO_TIMESTAMPNS, STAMP, Asked, Line, Lines, age_s, request
from bench.load.overload_figures import Bound, Refusal, figures, good, times
from bench.load.overload_load import Knock, Knocks, Stream, Try
from bench.load.overload_plan import PHASES, Plan, arrivals
from bench.load.overload_still import ANSWER, Still
from gateway.protocol.response_framing import parse_head

PLAN = Plan("http://gateway", "http://still", 0.0, 10.0, 1)
SPIKE, STORM = PLAN.window("spike"), PLAN.window("storm")
PHASE = {phase.name: place for place, phase in enumerate(PHASES)}


def tried(
    at_s: float, status: int = 200, took_s: float = 0.001, id: str = "", told_s: float | None = None
) -> Try:
    return Try(at_s, at_s, at_s + took_s, status, id, told_s)


def answered(
    *tries: Try, phase: str = "spike", ttft_s: float = 1.0, tpot_s: float = 0.1, tokens: int = 11
) -> Knock:
    """A client whose last try was answered with so many tokens."""
    first_s = tries[-1].due_s + ttft_s
    return Knock(
        0, PHASE[phase], [*tries], first_s, first_s + tpot_s * (tokens - 1), tokens, whole=True
    )


def refused(*tries: Try, phase: str = "spike") -> Knock:
    return Knock(0, PHASE[phase], [*tries])


def test_equal_seeds_ask_the_same_and_a_phase_at_twice_the_load_asks_twice_as_much() -> None:
    requests = list(arrivals(PHASES, 40.0, 3))
    assert requests == list(arrivals(PHASES, 40.0, 3))
    assert requests != list(arrivals(PHASES, 40.0, 4))
    assert [arrival.due_s for arrival in requests] == sorted(arrival.due_s for arrival in requests)
    counts = {
        name: sum(arrival.phase == place for arrival in requests) for name, place in PHASE.items()
    }
    for phase in PHASES:
        assert counts[phase.name] == pytest.approx(40.0 * phase.load * phase.seconds, rel=0.15)


def test_a_promise_counts_from_the_try_that_was_let_in_and_holds_for_both_budgets() -> None:
    late = tried(SPIKE[0] + 9.0)
    assert good(answered(tried(SPIKE[0], 429), late))
    assert not good(answered(late, ttft_s=5.1))
    assert not good(answered(late, tpot_s=0.26))
    assert not good(refused(late))
    broken = replace(answered(late), whole=False)
    assert not good(broken)
    assert good(replace(broken, cut=True))


def test_refusals_at_the_door_are_told_from_those_after_waiting() -> None:
    start = SPIKE[0] + 1.0
    knocks = [
        refused(tried(start, 429, 0.002, "a")),
        refused(tried(start, 429, 3.0, "b")),
        refused(tried(1.0, 429, 9.0, "c")),
    ]
    refusals = {"a": Refusal("price", 0.001), "b": Refusal("ttft", 2.9), "c": Refusal("price", 8.9)}
    summary = figures(PLAN, Knocks([0.0005], [(start, 0.001), (1.0, 7.0)], knocks), [], refusals, 0)
    assert (summary.shed.count, summary.shed.p50_ms, summary.waited.count) == (
        1,
        pytest.approx(2.0),
        1,
    )
    assert summary.refused == {"price": 1, "ttft": 1}
    assert summary.busy.p99_ms == pytest.approx(1.0)
    assert next(
        bound for bound in summary.bounds() if bound.name.endswith("p50")
    ).value == pytest.approx(1.5)


def test_only_clients_that_were_told_a_time_count_as_coming_back() -> None:
    start = SPIKE[0] + 1.0
    knocks = [
        answered(tried(start, 429, told_s=5.0), tried(start + 5.0)),
        refused(tried(start, 429, told_s=5.0), tried(start + 5.0, 429)),
        answered(tried(start, 429), tried(start + 0.5)),
    ]
    assert figures(PLAN, Knocks([], [], knocks), [], {}, 0).first_retry == 0.5


def test_recovery_counts_everybody_let_in_then_over_those_who_are_new() -> None:
    start = SPIKE[1] + 12.0
    back = answered(tried(SPIKE[0], 429, told_s=50.0), tried(start))
    new = [answered(tried(start), phase="after"), refused(tried(start, 429), phase="after")]
    summary = figures(PLAN, Knocks([], [], [back, *new]), [], {}, 0)
    assert (summary.good_after, summary.fresh_after) == (1.0, 0.5)


def test_what_reaches_the_engines_is_related_to_clients_not_to_tries() -> None:
    start = STORM[0] + 1.0
    knocks = [
        answered(tried(start, 429), tried(start + 0.4, 429), tried(start + 1.0), phase="storm"),
        refused(tried(1.0, 429)),
    ]
    summary = figures(PLAN, Knocks([], [], knocks), [], {}, 3)
    assert (summary.amplification, summary.tries) == (3.0, 3.0)


def test_a_stream_is_open_if_it_flows_in_every_phase_from_spike_to_storm() -> None:
    tokens = [10] * len(PHASES)
    cut = [*tokens[: PHASE["storm"]], 0, 0]
    slow = [*[1.0] * PHASE["spike"], 9.0, *[1.0] * (len(PHASES) - PHASE["spike"] - 1)]
    streams = [Stream(200, False, tokens, [1.0] * len(PHASES)), Stream(200, True, cut, slow)]
    summary = figures(PLAN, Knocks([], [], []), streams, {}, 0)
    assert (summary.streams_open, summary.streams_good) == (1, 0.5)


def test_bounds_hold_on_their_own_side() -> None:
    assert Bound("at most", 2.0, 2.0).held
    assert not Bound("at most", 2.1, 2.0).held
    assert not Bound("at least", 0.94, 0.95, least=True).held
    assert times([]).count == 0


HEAD = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\nx-request-id: req_1\r\nretry-after-ms: 2500\r\n\r\n"


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; the first does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
async def test_a_client_reads_an_answer_in_any_pieces_and_uses_its_connection_again(
    size: int, wire: tuple[socket.socket, socket.socket]
) -> None:
    pool, client = Lines("http://127.0.0.1:1"), Asked(asyncio.get_running_loop())
    line = Line(pool, wire[0])
    asking = asyncio.create_task(line.ask(b"POST", client))
    await asyncio.sleep(0)
    assert wire[1].recv(100) == b"POST"
    answer = HEAD + b"full"
    for index in range(0, len(answer), size):
        wire[1].sendall(answer[index : index + size])
        await asyncio.sleep(0)
    await asking
    assert (client.status, client.id, client.retry_after_s) == (429, "req_1", 2.5)
    assert client.answered_s is not None
    assert client.answered_s >= client.sent_s
    assert pool.idle == [line]
    line.close()


def test_how_long_bytes_lay_in_the_socket_is_known_from_the_kernels_stamp() -> None:
    stamp = STAMP.pack(1_700_000_000, 250_000_000)
    assert age_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)], 1_700_000_000.3) == pytest.approx(
        0.05, abs=1e-6
    )
    assert age_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)], 1_700_000_000.2) == 0.0
    assert age_s([], 1_700_000_000.3) == 0.0


async def test_a_connection_that_is_lost_ends_its_request_without_an_answer(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    client = Asked(asyncio.get_running_loop())
    line = Line(Lines("http://127.0.0.1:1"), wire[0])
    asking = asyncio.create_task(line.ask(b"POST", client))
    await asyncio.sleep(0)
    wire[1].close()
    await asking
    assert (client.status, line.open) == (None, False)


def test_the_server_that_does_nothing_answers_once_a_request_is_whole() -> None:
    still, transport, wanted = Still(), Mock(), request(100, 10, "test")
    still.connection_made(transport)
    still.data_received(wanted[:-1])
    transport.write.assert_not_called()
    still.data_received(wanted[-1:])
    transport.write.assert_called_once_with(ANSWER)
    head, _, body = ANSWER.partition(b"\r\n\r\n")
    assert parse_head(head + b"\r\n").length == len(body)
