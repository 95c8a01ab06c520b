"""Tests that `penstock status` and `penstock top` show what an operator has to act on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from redis import Redis

from gateway.cli import main
from tests.command_runner import CommandRunner
from tests.duration_limits import PATIENCE_S
from tests.redis_server import redis_server
from tests.unit.gateway.reload.running import Running, running

DIFFERS = "the file differs from the running configuration"
NOT_SHARED = "runs without shared state"


async def printed(gateway: Running, *words: str) -> str:
    words = (*words, "--admin", gateway.app.admin_url)
    done = await asyncio.to_thread(CommandRunner().invoke, main.run, words)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@contextmanager
def dead_redis() -> Iterator[tuple[str, str]]:
    with socket.socket() as refusing:  # a bound socket that does not listen refuses connections
        refusing.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{refusing.getsockname()[1]}", "no server listens there"


@contextmanager
def redis_with_another_password() -> Iterator[tuple[str, str]]:
    with redis_server() as server:
        with Redis.from_url(server.url) as operator:
            operator.config_set("requirepass", "right-one")
        yield server.url, "it refuses the user or the password"


@pytest.mark.parametrize("unusable", [dead_redis, redis_with_another_password])
async def test_status_and_top_name_the_cause_of_an_unusable_redis(
    tmp_path: Path, unusable: Callable[[], AbstractContextManager[tuple[str, str]]]
) -> None:
    with unusable() as (url, cause):
        shared = (
            f"shared: {{redis: {{url: '{url}', password: hunter2}}, key: what-gateways-share}}\n"
        )
        async with running(tmp_path, more=shared) as gateway:
            async with asyncio.timeout(PATIENCE_S):
                while not (await gateway.asked("GET", "/config"))[2]["shared"]["problem"]:
                    await asyncio.sleep(0.01)
            for words in (("status",), ("top", "--once")):
                text = await printed(gateway, *words)
                assert "Redis is not usable: " in text
                assert cause in text
                assert NOT_SHARED in text
                assert "hunter2" not in text


async def test_status_reports_that_file_and_running_configuration_differ(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        assert DIFFERS not in await printed(gateway, "status")
        gateway.write(gateway.text().replace("prefix_aware", "least_loaded"))
        await gateway.hears("reloaded")
        assert DIFFERS not in await printed(gateway, "status")
        assert (await gateway.asked("POST", "/config/rollback"))[0] == 200
        assert DIFFERS in await printed(gateway, "status")
