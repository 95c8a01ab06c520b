"""Tests of the results that `make overload` computes, and of its HTTP client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from bench.load.overload_client import (
    SO_TIMESTAMPNS,
    STAMP,
    ConnectionPool,
    TimedConnection,
    TimedRequest,
    age_s,
    request,
)
from bench.load.overload_figures import Bound, Refusal, figures, is_good, times
from bench.load.overload_load import ClientRecord, ClientRecords, Stream, Try
from bench.load.overload_null_server import ANSWER, NullConnection
from bench.load.overload_plan import PHASES, Plan, arrivals
from gateway.protocol.response.http_response_parser import parse_head

PLAN = Plan("http://gateway", "http://null", 0.0, 10.0, 1)
SPIKE, STORM = PLAN.window("spike"), PLAN.window("storm")
PHASE = {phase.name: index for index, phase in enumerate(PHASES)}


def make_try(
    sent_s: float,
    status: int = 200,
    took_s: float = 0.001,
    id: str = "",
    retry_after_s: float | None = None,
) -> Try:
    return Try(sent_s, sent_s, sent_s + took_s, status, id, retry_after_s)


def answered_client(
    *tries: Try, phase: str = "spike", ttft_s: float = 1.0, tpot_s: float = 0.1, tokens: int = 11
) -> ClientRecord:
    first_s = tries[-1].due_s + ttft_s
    return ClientRecord(
        0, PHASE[phase], [*tries], first_s, first_s + tpot_s * (tokens - 1), tokens, whole=True
    )


def refused_client(*tries: Try, phase: str = "spike") -> ClientRecord:
    return ClientRecord(0, PHASE[phase], [*tries])


def test_arrivals_depend_on_the_seed_and_their_number_on_the_load_of_the_phase() -> None:
    requests = list(arrivals(PHASES, 40.0, 3))
    assert requests == list(arrivals(PHASES, 40.0, 3))
    assert requests != list(arrivals(PHASES, 40.0, 4))
    assert [one.due_s for one in requests] == sorted(one.due_s for one in requests)
    counts = {name: sum(one.phase == index for one in requests) for name, index in PHASE.items()}
    for phase in PHASES:
        assert counts[phase.name] == pytest.approx(40.0 * phase.load * phase.seconds, rel=0.15)


def test_both_budgets_count_from_the_admitted_try() -> None:
    late = make_try(SPIKE[0] + 9.0)
    assert is_good(answered_client(make_try(SPIKE[0], 429), late))
    assert not is_good(answered_client(late, ttft_s=5.1))
    assert not is_good(answered_client(late, tpot_s=0.26))
    assert not is_good(refused_client(late))
    broken = replace(answered_client(late), whole=False)
    assert not is_good(broken)
    assert is_good(replace(broken, cut=True))


def test_immediate_refusals_are_separated_from_those_after_waiting() -> None:
    sent_s = SPIKE[0] + 1.0
    clients = [
        refused_client(make_try(sent_s, 429, 0.002, "a")),
        refused_client(make_try(sent_s, 429, 3.0, "b")),
        refused_client(make_try(1.0, 429, 9.0, "c")),
    ]
    refusals = {"a": Refusal("price", 0.001), "b": Refusal("ttft", 2.9), "c": Refusal("price", 8.9)}
    result = figures(
        PLAN, ClientRecords([0.0005], [(sent_s, 0.001), (1.0, 7.0)], clients), [], refusals, 0
    )
    assert (result.shed.count, result.shed.p50_ms, result.waited.count) == (
        1,
        pytest.approx(2.0),
        1,
    )
    assert result.refused == {"price": 1, "ttft": 1}
    assert result.busy.p99_ms == pytest.approx(1.0)
    assert next(
        bound for bound in result.bounds() if bound.name.endswith("p50")
    ).value == pytest.approx(1.5)


def test_only_clients_with_a_retry_after_count_as_obedient_retries() -> None:
    sent_s = SPIKE[0] + 1.0
    clients = [
        answered_client(make_try(sent_s, 429, retry_after_s=5.0), make_try(sent_s + 5.0)),
        refused_client(make_try(sent_s, 429, retry_after_s=5.0), make_try(sent_s + 5.0, 429)),
        answered_client(make_try(sent_s, 429), make_try(sent_s + 0.5)),
    ]
    assert figures(PLAN, ClientRecords([], [], clients), [], {}, 0).first_retry == 0.5


def test_recovery_is_all_good_admitted_requests_relative_to_new_clients() -> None:
    sent_s = SPIKE[1] + 12.0
    back = answered_client(make_try(SPIKE[0], 429, retry_after_s=50.0), make_try(sent_s))
    new = [
        answered_client(make_try(sent_s), phase="after"),
        refused_client(make_try(sent_s, 429), phase="after"),
    ]
    result = figures(PLAN, ClientRecords([], [], [back, *new]), [], {}, 0)
    assert (result.good_after, result.fresh_after) == (1.0, 0.5)


def test_amplification_is_engine_requests_per_client_not_per_try() -> None:
    sent_s = STORM[0] + 1.0
    clients = [
        answered_client(
            make_try(sent_s, 429),
            make_try(sent_s + 0.4, 429),
            make_try(sent_s + 1.0),
            phase="storm",
        ),
        refused_client(make_try(1.0, 429)),
    ]
    result = figures(PLAN, ClientRecords([], [], clients), [], {}, 3)
    assert (result.amplification, result.tries) == (3.0, 3.0)


def test_a_stream_is_open_if_it_flows_in_every_phase_from_spike_to_storm() -> None:
    tokens = [10] * len(PHASES)
    cut = [*tokens[: PHASE["storm"]], 0, 0]
    slow = [*[1.0] * PHASE["spike"], 9.0, *[1.0] * (len(PHASES) - PHASE["spike"] - 1)]
    streams = [Stream(200, False, tokens, [1.0] * len(PHASES)), Stream(200, True, cut, slow)]
    result = figures(PLAN, ClientRecords([], [], []), streams, {}, 0)
    assert (result.streams_open, result.streams_good) == (1, 0.5)


def test_a_bound_is_a_maximum_or_a_minimum() -> None:
    assert Bound("at most", 2.0, 2.0).is_met
    assert not Bound("at most", 2.1, 2.0).is_met
    assert not Bound("at least", 0.94, 0.95, least=True).is_met
    assert times([]).count == 0


HEAD = (
    b"HTTP/1.1 429 Too Many Requests\r\n"
    b"content-length: 4\r\nx-request-id: req_1\r\nretry-after-ms: 2500\r\n\r\n"
)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    # Yield both ends of a connection; the first one is non-blocking.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
async def test_a_client_reads_an_answer_in_pieces_of_any_size_and_reuses_its_connection(
    size: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    pool, timed = ConnectionPool("http://127.0.0.1:1"), TimedRequest(asyncio.get_running_loop())
    connection = TimedConnection(pool, sockets[0])
    task = asyncio.create_task(connection.send(b"POST", timed))
    await asyncio.sleep(0)
    assert sockets[1].recv(100) == b"POST"
    answer = HEAD + b"full"
    for start in range(0, len(answer), size):
        sockets[1].sendall(answer[start : start + size])
        await asyncio.sleep(0)
    await task
    assert (timed.status, timed.id, timed.retry_after_s) == (429, "req_1", 2.5)
    assert timed.answered_s is not None
    assert timed.answered_s >= timed.sent_s
    assert pool.idle == [connection]
    connection.close()


def test_the_age_of_unread_bytes_comes_from_the_kernels_timestamp() -> None:
    stamp = STAMP.pack(1_700_000_000, 250_000_000)
    assert age_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)], 1_700_000_000.3) == pytest.approx(
        0.05, abs=1e-6
    )
    assert age_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)], 1_700_000_000.2) == 0.0
    assert age_s([], 1_700_000_000.3) == 0.0


async def test_a_lost_connection_ends_its_request_without_an_answer(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    timed = TimedRequest(asyncio.get_running_loop())
    connection = TimedConnection(ConnectionPool("http://127.0.0.1:1"), sockets[0])
    task = asyncio.create_task(connection.send(b"POST", timed))
    await asyncio.sleep(0)
    sockets[1].close()
    await task
    assert (timed.status, connection.open) == (None, False)


def test_the_null_server_answers_once_a_request_is_complete() -> None:
    server_side, transport, body = NullConnection(), Mock(), request(100, 10, "test")
    server_side.connection_made(transport)
    server_side.data_received(body[:-1])
    transport.write.assert_not_called()
    server_side.data_received(body[-1:])
    transport.write.assert_called_once_with(ANSWER)
    head, _, body = ANSWER.partition(b"\r\n\r\n")
    assert parse_head(head + b"\r\n").length == len(body)
