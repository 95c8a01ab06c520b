"""Conversations with OpenCode, one process per turn, which continues the session."""

from __future__ import annotations

import json

import agent_process
from driver import KEY, MODEL, URL, Turn, measured_pump, run, shell_call

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Penstock",
    "options": {"baseURL": f"{URL}/v1", "apiKey": KEY},
    "models": {MODEL: {"name": MODEL}},
}


class Conversation:
    def __init__(self, number: int) -> None:
        self.session = ""
        # Processes that share a home wait for each other's database.
        self.home = agent_process.HOME / f"site-{number}"
        settings = self.home / ".config" / "opencode"
        settings.mkdir(parents=True)
        page = {"provider": {"penstock": PROVIDER}}
        (settings / "opencode.json").write_text(json.dumps(page))

    async def ask(self, text: str) -> Turn:
        resume = ("--session", self.session) if self.session else ()
        written = await agent_process.run_once(
            *("opencode", "run", "--format", "json", "-m", f"penstock/{MODEL}", *resume),
            text=text,
            folder=self.home,
            HOME=str(self.home),
        )
        turn = Turn()
        for line in written:
            self.session = line.get("sessionID", self.session)
            part = line.get("part", {})
            if line["type"] == "text":
                turn.text += part["text"]
            if line["type"] == "tool_use":
                turn.measured.append(measured_pump(part["state"]["input"]["command"]))
        return turn


run(Conversation, shell_call("bash", "command", description="Measure the depth"))
