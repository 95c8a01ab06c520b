"""Tests of the message bus between gateways over a Redis server that requires TLS and client
certificates.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from gateway.peers import redis_bus as shared
from gateway.peers.redis_bus import RedisAddress, RedisBus
from gateway.util.certificate_files import KeyPair
from gateway.util.tls_contexts import ClientSettings
from tests.certificate_authority import Authority, Files
from tests.duration_limits import PATIENCE_S
from tests.ports import free_port


@contextmanager
def tls_server(folder: Path, files: Files, ca: Path) -> Iterator[str]:
    # Run a Redis server that accepts only TLS with a client certificate; yield its URL.
    program = shutil.which("redis-server")
    assert program is not None
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(files.certificate)]
    options += [
        "--tls-key-file",
        str(files.key),
        "--tls-ca-cert-file",
        str(ca),
        "--tls-auth-clients",
        "yes",
    ]
    process = subprocess.Popen(
        [program, *options, "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"rediss://localhost:{port}"
    finally:
        process.kill()
        process.wait(PATIENCE_S)


async def reaches(url: str, settings: ClientSettings) -> str:
    bus = RedisBus(RedisAddress(url, "fleet", tls=settings), Random(1), lambda reason: None)
    await bus.start(b"me" * 4, lambda frame, age_s: None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state = bus.state(monotonic())
                if state.connected or "TLS" in state.problem:
                    return state.problem
                await asyncio.sleep(0.01)
    finally:
        await bus.stop()


async def test_the_bus_verifies_redis_by_its_authority_and_presents_the_gateways_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "FIRST_RETRY_S", 0.05)
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    own = ours.issue("gateway", "gateway")
    pair = KeyPair(str(own.certificate), str(own.key))
    with tls_server(tmp_path, ours.issue("redis", "localhost"), ours.ca) as url:
        assert await reaches(url, ClientSettings(str(ours.ca), pair)) == ""
        assert "TLS failed" in await reaches(url, ClientSettings(str(other.ca), pair))
