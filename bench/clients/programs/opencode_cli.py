"""Client program of `make clients`: conversations with OpenCode, all on one OpenCode server."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import signal
import urllib.request
from asyncio.subprocess import Process
from typing import Any

import agent_process
from conversations import KEY, MODEL, URL, Turn, measured_pump, run, shell_call

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Penstock",
    "options": {"baseURL": f"{URL}/v1", "apiKey": KEY},
    "models": {MODEL: {"name": MODEL}},
}
SETTINGS = agent_process.HOME / ".config" / "opencode"
SETTINGS.mkdir(parents=True)
(SETTINGS / "opencode.json").write_text(json.dumps({"provider": {"penstock": PROVIDER}}))
ASK_S = 120.0


class Server:
    """The process of OpenCode's server, which runs all conversations of this client program.

    It is started by the first request.
    """

    def __init__(self) -> None:
        self._url = ""
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request to OpenCode's server, and return the parsed JSON response.

        It is a POST with the JSON `body`, or a GET if there is no body.
        """
        async with self._lock:
            if not self._url:
                self._url = await self._start()
        return await asyncio.to_thread(self._send, path, body)

    async def _start(self) -> str:
        self._process = await agent_process.start("opencode", "serve", "--hostname", "127.0.0.1")
        atexit.register(os.kill, self._process.pid, signal.SIGKILL)
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if found := re.search(rb"http://[0-9.:]+", line):
                return found[0].decode()
        raise RuntimeError("the process `opencode serve` ended before its sessions were complete")

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return json.load(answer)


SERVER = Server()


class Conversation:
    def __init__(self, number: int) -> None:
        self.session = ""

    async def ask(self, text: str) -> Turn:
        if not self.session:
            self.session = (await SERVER.ask("/session", {}))["id"]
        model = {"providerID": "penstock", "modelID": MODEL}
        body = {"model": model, "parts": [{"type": "text", "text": text}]}
        answer = await SERVER.ask(f"/session/{self.session}/message", body)
        turn = Turn()
        for part in await self._parts(answer["info"]["parentID"]):
            if part["type"] == "text":
                turn.text += part["text"]
            if part["type"] == "tool":
                turn.measured.append(measured_pump(part["state"]["input"]["command"]))
        return turn

    async def _parts(self, question: str) -> list[Any]:
        # Return the parts of all messages that answer a message of the user.
        messages = await SERVER.ask(f"/session/{self.session}/message")
        return [
            part
            for message in messages
            if message["info"].get("parentID") == question
            for part in message["parts"]
        ]


run(Conversation, shell_call("bash", "command", description="Measure the depth"))
