"""Runs the conversations of one client program, and prints the results as one line of JSON.

A program defines a session class with a method `ask`, and calls run(). All sessions run
concurrently. In the middle of each session, the user's message makes the model call the tool
`measure`, so that the client must run the tool and send back its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

URL = os.environ["GATEWAY_URL"]
KEY = os.environ["GATEWAY_KEY"]
MODEL = os.environ["GATEWAY_MODEL"]
SESSIONS = int(os.environ.get("SESSIONS", "4"))
TURNS = int(os.environ.get("TURNS", "20"))
FIRST_SITE = int(os.environ.get("FIRST_SITE", "0"))
VARIANT = os.environ.get("VARIANT", "")

INSTRUCTIONS = (
    "You look after the pumps of a reservoir. Measure the depth when you are asked to, say what "
    "you find in a few words, and name the pump. Never guess a depth that you have not measured. "
) * 2
TOOL_NAME = "measure"
TOOL_TEXT = "Measure the depth at a pump, in metres."
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"pump": {"type": "integer"}},
    "required": ["pump"],
    "additionalProperties": False,
}


@dataclass
class Turn:
    """What a client program received in one turn of a conversation.

    text      the text of the answer
    pieces    number of stream chunks
    measured  pump numbers with which the tool `measure` was called
    """

    text: str = ""
    pieces: int = 0
    measured: list[int] = field(default_factory=list)


class Session(Protocol):
    """One conversation of a client program with the gateway; each program implements this."""

    async def ask(self, text: str) -> Turn:
        """Send the user's next message, run the tools that the model calls, and return the
        answer.
        """
        ...


def measure(pump: int) -> str:
    """Return the result of the tool `measure`: a sentence with the water depth at a pump.

    pump  number of the pump
    """
    return f"The depth at pump {pump} is {pump + 3} m."


Call = Callable[[int], tuple[str, dict[str, Any]]]
"""A function that returns the call of a tool in one session: the tool's name and its arguments.

The tool stands for an agent's tools; it measures the depth at the pump with the given number.
"""


def measure_call(pump: int) -> tuple[str, dict[str, Any]]:
    """Return the name and the JSON arguments of a model's call of the tool `measure` for a pump."""
    return TOOL_NAME, {"pump": pump}


def shell_call(name: str, member: str, **others: str) -> Call:
    """Return a function that builds a model's call of an agent's shell tool.

    name    name of the tool
    member  the argument that contains the command
    others  further arguments
    """
    return lambda pump: (name, {member: f"echo pump {pump} is {pump + 3} m deep", **others})


def measured_pump(command: str) -> int:
    """Return the number of the pump in an agent's shell command, which shell_call() has built."""
    return int(command.partition("echo pump ")[2].partition(" ")[0])


def question(session: int, turn: int, call: Call) -> str:
    """Return the user's message for one turn of a session.

    In the middle turn, the message makes the mock model request the tool call `call`.
    """
    if turn == TURNS // 2:
        name, arguments = call(turn)
        return f"Please call the tool {name} with {json.dumps(arguments)} and report."
    return (
        f"This is message {turn} about site {session}. How deep is the water at pump {turn}, and "
        f"what should the operator of site {session} do about the valve, the filter and the log?"
    )


async def _converse(session: Session, number: int, call: Call, found: dict[str, Any]) -> None:
    for turn in range(TURNS):
        answer = await session.ask(question(number, turn, call))
        assert answer.text.strip(), f"turn {turn} has no text"
        wanted = [turn] if turn == TURNS // 2 else []
        assert answer.measured == wanted, f"turn {turn} measured {answer.measured}, not {wanted}"
        found["turns"] += 1
        found["streamed"] += answer.pieces > 1
        found["calls"] += len(answer.measured)


async def _run(start: Callable[[int], Session], call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {"turns": 0, "streamed": 0, "calls": 0, "errors": []}
    running = (
        _converse(start(site), site, call, found)
        for site in range(FIRST_SITE, FIRST_SITE + SESSIONS)
    )
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(outcome, BaseException):
            traceback.print_exception(outcome, file=sys.stderr)
            found["errors"].append(f"{type(outcome).__name__}: {outcome}"[:300])
    return found


def run(start: Callable[[int], Session], call: Call = measure_call) -> None:
    """Run all conversations of a client program, and print the results as one line of JSON.

    start  function that creates the session with a given number
    call   function that builds the tool call that the mock model must make
    """
    print(json.dumps(asyncio.run(_run(start, call))))
