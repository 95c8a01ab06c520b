"""The training for profile-guided optimization: a compiled gateway serves a mix of requests.

The mix has every kind of request, so that the profile shows which code runs often. Recording and
using the profile is in tools/compile/compile.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

REQUESTS = 2000
USERS = 24
PROMPT_BYTES = (120, 120, 120, 2_000, 8_000, 32_000, 130_000)
SERVED = "demo-8b"  # the mock groups' model
MODELS = (SERVED,) * 6 + ("priced", "split")
TRUNKS = 8  # number of different beginnings of prompts
ENDS_WITHIN_S = 300.0
SPLIT = "vllm_nixl"
HALF = ("--dialect", SPLIT, "--role")
_READY = re.compile(r"API (http://\S+)/v1")


class TrainingError(Exception):
    """The instrumented modules do not run, answer wrongly, or write no profile."""


def train(tree: Path) -> None:
    """Run the gateway in `tree` with the mix, and end it by SIGTERM, so that it writes a profile.

    Raises TrainingError when the gateway does not start or answers wrongly, and
    subprocess.TimeoutExpired when it does not end.
    """
    with ExitStack() as running:
        plain, priced = (running.enter_context(_mocks(tree, 4)) for _ in range(2))
        prefill, decode = (
            running.enter_context(_mocks(tree, 1, *HALF, role)) for role in ("prefill", "decode")
        )
        config = Path(running.enter_context(TemporaryDirectory())) / "gateway.yaml"
        config.write_text(configuration(plain, priced, prefill, decode))
        gateway = running.enter_context(
            _running(tree, "gateway", "serve", "--config", str(config), output="stderr")
        )
        asyncio.run(_send_all(_read_url(gateway.stderr)))


def configuration(
    plain: list[str], priced: list[str], prefill: list[str], decode: list[str]
) -> str:
    """Build the configuration of three pools: defaults, pricing, and split requests."""
    split = {"dialect": SPLIT, "threshold_tokens": 64, "hysteresis": 0}
    roles = [
        (url, role) for role, urls in (("prefill", prefill), ("decode", decode)) for url in urls
    ]
    halves = [{"url": url, "role": role, "served_model": SERVED} for url, role in roles]
    priced_endpoints = [{"url": url, "served_model": SERVED} for url in priced]
    return json.dumps({
        "version": 1,
        "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
        "models": [
            {"name": SERVED, "pool": "plain"},
            {"name": "priced", "pool": "priced"},
            {"name": "split", "pool": "split", "split": split},
        ],
        "pools": {
            "plain": {"endpoints": [{"url": url} for url in plain]},
            "priced": {"policy": "priced", "admission": "priced", "endpoints": priced_endpoints},
            "split": {"endpoints": halves},
        },
        "observability": {"access_log": "/dev/null"},
    })  # fmt: skip


async def _send_all(url: str) -> None:
    """Send the mix by users with one request at a time each."""
    bodies = iter(mix(random.Random(0)))
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as users,
    ):
        for _ in range(USERS):
            users.create_task(_user(http, f"{url}/v1/chat/completions", bodies))


async def _user(http: aiohttp.ClientSession, url: str, bodies: Iterator[bytes]) -> None:
    for body in bodies:
        async with http.post(
            url, data=body, headers={"content-type": "application/json"}
        ) as answer:
            text = await answer.text()
            if answer.status not in (200, 429):
                raise TrainingError(f"{answer.status}: {text}")


def mix(rng: random.Random) -> Iterator[bytes]:
    """Yield the bodies of the requests, formatted as by an SDK."""
    trunks = [_text(rng, max(PROMPT_BYTES)) for _ in range(TRUNKS)]
    for number in range(REQUESTS):
        size = rng.choice(PROMPT_BYTES)
        prompt = rng.choice(trunks)[: size * 3 // 4] + f" {number} " + _text(rng, size // 4)
        body: dict[str, Any] = {
            "model": rng.choice(MODELS),
            "messages": [{"role": "user", "content": prompt}],
        }
        body["max_tokens"] = rng.choice((1, 16, 64))
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        yield json.dumps(body, separators=(",", ":")).encode()


def _text(rng: random.Random, size: int) -> str:
    """Return random text of `size` bytes."""
    words = (
        "the",
        "wheel",
        "turns",
        "where",
        "water",
        "falls,",
        "and\n",
        '"gate"',
        "of",
        "a",
        "penstock",
    )
    return " ".join(rng.choices(words, k=size // 5 + 1))[:size]


@contextmanager
def _mocks(tree: Path, count: int, *options: str) -> Iterator[list[str]]:
    """Run `count` mock groups, much faster than real engines, and yield their URLs."""
    arguments = ("--port", "0", "--groups", str(count), "--speed", "50", "--json", *options)
    with _running(tree, "mockgpu", *arguments, output="stdout") as process:
        yield [json.loads(process.stdout.readline())["ready"] for _ in range(count)]


@contextmanager
def _running(
    tree: Path, module: str, *options: str, output: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a module of the tree as a process while the block runs; `output` is the piped stream."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": None} | {output: subprocess.PIPE}
    command = [sys.executable, "-B", "-m", module, *options]  # no bytecode files in the tree
    with subprocess.Popen(command, cwd=tree, text=True, **streams) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)


def _read_url(lines: Any) -> str:
    """Read the gateway's output up to the URL that it listens on, and return the URL."""
    output = []
    for line in lines:
        output.append(line)
        if match := _READY.search(line):
            # Drain further output, so that the pipe does not fill.
            threading.Thread(target=lines.read, daemon=True).start()
            return match[1]
    raise TrainingError(f"the gateway ended before it listened: {''.join(output)}")
