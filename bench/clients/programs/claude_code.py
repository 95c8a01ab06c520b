"""Client program of `make clients`: conversations with Claude Code, one process per session."""

from __future__ import annotations

import json
from asyncio.subprocess import Process

import agent_process
from conversations import KEY, MODEL, URL, Turn, measured_pump, run, shell_call

COMMAND = ("claude", "-p", "--verbose", "--include-partial-messages")
FORMATS = ("--input-format", "stream-json", "--output-format", "stream-json")
TOOLS = ("--allowedTools", "Bash")
ENV = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": MODEL}


class Conversation:
    def __init__(self, number: int) -> None:
        self.process: Process | None = None

    async def ask(self, text: str) -> Turn:
        if self.process is None:
            self.process = await agent_process.start(*COMMAND, *FORMATS, *TOOLS, **ENV)
        message = {"type": "user", "message": {"role": "user", "content": text}}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        turn = Turn()
        async for line in agent_process.lines(self.process):
            turn.pieces += line["type"] == "stream_event"
            if line["type"] == "assistant":
                for block in line["message"]["content"]:
                    if block["type"] == "tool_use":
                        turn.measured.append(measured_pump(block["input"]["command"]))
            if line["type"] == "result":
                assert not line["is_error"], line
                turn.text = line["result"]
                return turn
        raise RuntimeError("the process of Claude Code ended before it printed an answer")


run(Conversation, shell_call("Bash", "command"))
