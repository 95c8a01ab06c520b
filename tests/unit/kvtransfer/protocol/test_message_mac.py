"""Tests that messages are signed with HMAC-SHA256, without giving up the interpreter lock."""

from __future__ import annotations

import hmac
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.message_mac import MessageMac
from tests.unit.kvtransfer.interpreter_lock import keeps_interpreter_lock


@given(key=st.binary(max_size=200), message=st.binary(max_size=300))
def test_a_signature_is_hmac_sha256(key: bytes, message: bytes) -> None:
    mac = MessageMac(key)
    expected = hmac.digest(key, message, "sha256")
    assert mac.digest(message) == expected
    assert mac.digest(message) == expected  # the key's state does not change


@pytest.mark.parametrize(
    "size", [2046, 2047, 2048, 4094, 4095, (32 << 10) - 1, 32 << 10, (32 << 10) + 1, 100_000]
)
def test_a_signature_of_a_message_of_any_size_is_hmac_sha256(size: int) -> None:
    message = random.Random(size).randbytes(size)
    assert MessageMac(b"key").digest(message) == hmac.digest(b"key", message, "sha256")


@pytest.mark.parametrize("size", [0, 100, 16 << 10])
def test_signing_keeps_the_interpreter_lock(size: int) -> None:
    mac, message = MessageMac(bytes(32)), bytes(size)
    assert keeps_interpreter_lock(lambda: mac.digest(message))
