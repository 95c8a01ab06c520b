"""Tests of the proxy that records client programs: it knows complete and broken answers."""

from __future__ import annotations

import pytest

from bench.clients.recorder import Connection

REQUEST = b"POST /v1/responses HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DELTA = b"event: response.output_text.delta\ndata: {}\n\n"
COMPLETED = b"event: response.completed\ndata: {}\n\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (HEAD + chunk(DELTA) + chunk(COMPLETED) + b"0\r\n\r\n", 200),
        (HEAD + chunk(DELTA) + chunk(COMPLETED), 200),
        (HEAD + chunk(DELTA), 0),
        (HEAD + chunk(DELTA) + chunk(COMPLETED)[:-9], 0),
        (HEAD, 0),
        (b"", 0),
    ],
)
def test_an_answer_counts_once_its_last_event_has_arrived(answer: bytes, status: int) -> None:
    connection = Connection()
    connection.add_sent(REQUEST)
    connection.received += answer
    (exchange,) = connection.exchanges()
    assert exchange.status == status
