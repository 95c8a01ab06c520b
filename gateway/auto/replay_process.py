"""Starts the process that replays the access log with several policies, once per comparison.

The process limits its CPU use (planner/auto/cpu_budget.py). It ends when its standard input closes,
which also happens when the gateway is killed.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE

import msgspec

from policies.auto.replay_messages import ReplayAnswer, ReplayJob

LIMIT_S = 3600.0
"""Maximum duration of one comparison of policies in seconds; after that it is cancelled."""

MOST_ANSWER_BYTES = 1 << 20


class ReplayError(Exception):
    """Raised if the replay process returned no result; the message gives the cause."""


async def run_replay(job: ReplayJob) -> ReplayAnswer:
    """Run one job in a new replay process, and return its result.

    If the calling task is cancelled, the process is killed. Raises ReplayError if the process
    cannot be started, fails, or takes too long.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planner.auto"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=MOST_ANSWER_BYTES,
            start_new_session=True,  # so that Ctrl-C reaches only the gateway
        )
    except OSError as error:
        raise ReplayError(f"the replay process could not be started: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        async with asyncio.timeout(LIMIT_S):
            answer = await process.stdout.read(MOST_ANSWER_BYTES)
            while part := await process.stdout.read(MOST_ANSWER_BYTES - len(answer)):
                answer += part
            status = await process.wait()
        if status:
            raise ReplayError(f"the replay process ended with status {status}")
        return msgspec.json.decode(answer, type=ReplayAnswer)
    except TimeoutError:
        raise ReplayError(f"the replay process took longer than {LIMIT_S:.0f} s") from None
    except (msgspec.DecodeError, OSError) as error:
        raise ReplayError(f"the replay process returned no valid result: {error}") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process.stdin.close()
