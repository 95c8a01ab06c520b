"""Tests of what the error of a failed health check shows about the endpoint."""

from __future__ import annotations

import errno

import pytest

from gateway.fleet.probe_errors import clear_frames, is_unreachable
from gateway.http.engine_poll_client import ConnectError, ConnectionLostError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectError(OSError(errno.ECONNREFUSED, "refused")), True),
        (ConnectError(OSError(errno.EMFILE, "too many open files")), False),
        (ConnectionLostError("lost"), True),
        (OSError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.EINVAL, "invalid"), False),
        (TimeoutError(), False),
    ],
)
def test_only_a_failed_or_lost_connection_means_that_nothing_listens(
    error: BaseException, expected: bool
) -> None:
    assert is_unreachable(error) == expected


def fail_to_connect() -> None:
    try:
        raise OSError("the test's connection to the engine fails")
    except OSError as cause:
        raise ConnectError(cause) from cause


def test_an_error_and_its_cause_keep_no_frames() -> None:
    with pytest.raises(ConnectError) as raised:
        fail_to_connect()
    error = raised.value
    assert error.__traceback__ is not None
    clear_frames(error)
    assert (error.__traceback__, error.os_error.__traceback__) == (None, None)
