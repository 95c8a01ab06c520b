"""Runs command-line agents that print one JSON object per line."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

MAX_LINE = 1 << 22
HOME = Path(tempfile.mkdtemp(prefix="client-home-"))


async def start(*command: str, folder: Path = HOME, **env: str) -> Process:
    """Start a command-line agent with a new home directory, so that no user settings apply."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        limit=MAX_LINE,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(HOME), "TERM": "dumb", **env},
    )


async def lines(process: Process) -> AsyncIterator[Any]:
    """Yield each line of an agent's output that is a JSON object, decoded.

    Other lines are skipped.
    """
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"{"):
            yield json.loads(line)


async def run_once(*command: str, text: str, folder: Path = HOME, **env: str) -> list[Any]:
    """Run an agent to its end, with the user's message on its standard input.

    Returns the JSON objects that it wrote. Raises RuntimeError if it fails.
    """
    process = await start(*command, folder=folder, **env)
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.close()
    found = [line async for line in lines(process)]
    if await process.wait():
        raise RuntimeError(
            f"the client program {command[0]} ended with status {process.returncode}; its last "
            f"two lines: {found[-2:]}"
        )
    return found
