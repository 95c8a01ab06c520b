"""What compiled modules are trained with: requests of every kind, so that the compiler learns what runs often.

Lives here: mock TP groups, a gateway out of the compiled tree before them, a few users, and the mix they ask for. Not
here: how the compiler notes what ran, and what it makes of that (tools/compile/compile.py).
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
SERVED = "demo-8b"  # as mock TP groups call what they serve
MODELS = (SERVED,) * 6 + ("priced", "split")
TRUNKS = 8  # prompts of one size begin in so many ways
ENDS_WITHIN_S = 300.0
SPLIT = "vllm_nixl"
HALF = ("--dialect", SPLIT, "--role")
_READY = re.compile(r"API (http://\S+)/v1")


class TrainingError(Exception):
    """Modules that were made to note what runs do not run, or note nothing; the message says how."""


def train(tree: Path) -> None:
    """Has the gateway in `tree` serve the mix, and ends it as operators do, so that it writes what it noted.

    Raises TrainingError when it does not start or answers wrongly, subprocess.TimeoutExpired when it does not end.
    """
    with ExitStack() as running:
        plain, priced = (running.enter_context(_mocks(tree, 4)) for _ in range(2))
        prefill, decode = (
            running.enter_context(_mocks(tree, 1, *HALF, role)) for role in ("prefill", "decode")
        )
        config = Path(running.enter_context(TemporaryDirectory())) / "gateway.yaml"
        config.write_text(configuration(plain, priced, prefill, decode))
        gateway = running.enter_context(
            _running(tree, "gateway", "serve", "--config", str(config), told_on="stderr")
        )
        asyncio.run(_ask(_heard(gateway.stderr)))


def configuration(
    plain: list[str], priced: list[str], prefill: list[str], decode: list[str]
) -> str:
    """Three ways to serve: the defaults, everything that prices, and pairs. Any file may be the access log."""
    split = {"dialect": SPLIT, "threshold_tokens": 64, "hysteresis": 0}
    roles = [
        (url, role) for role, urls in (("prefill", prefill), ("decode", decode)) for url in urls
    ]
    halves = [{"url": url, "role": role, "served_model": SERVED} for url, role in roles]
    beliefs = [{"url": url, "served_model": SERVED} for url in priced]
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
            "priced": {"policy": "priced", "admission": "priced", "endpoints": beliefs},
            "split": {"endpoints": halves},
        },
        "observability": {"access_log": "/dev/null"},
    })  # fmt: skip


async def _ask(url: str) -> None:
    """Users who each wait for their answers before they ask again, until the mix is through."""
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
    """Requests as an SDK writes them."""
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
    """So many bytes."""
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
    """The URLs of so many mock TP groups that are quicker than any engine."""
    asked = ("--port", "0", "--groups", str(count), "--speed", "50", "--json", *options)
    with _running(tree, "mockgpu", *asked, told_on="stdout") as process:
        yield [json.loads(process.stdout.readline())["ready"] for _ in range(count)]


@contextmanager
def _running(
    tree: Path, module: str, *options: str, told_on: str
) -> Iterator[subprocess.Popen[str]]:
    """A module of the tree as a process, until the block is left."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": None} | {told_on: subprocess.PIPE}
    command = [
        sys.executable,
        "-B",
        "-m",
        module,
        *options,
    ]  # no bytecode: what is shipped writes its own
    with subprocess.Popen(command, cwd=tree, text=True, **streams) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)


def _heard(lines: Any) -> str:
    """The URL that the gateway says it listens at."""
    said = []
    for line in lines:
        said.append(line)
        if found := _READY.search(line):
            threading.Thread(
                target=lines.read, daemon=True
            ).start()  # whatever else it says must not fill the pipe
            return found[1]
    raise TrainingError(f"the gateway ended before it listened: {''.join(said)}")
