"""Client program of `make clients`: conversations with pydantic-ai.

The environment variable VARIANT is the provider in the model's name, such as `openai`.
"""

from __future__ import annotations

from typing import Any

import conversations
from conversations import INSTRUCTIONS, MODEL, VARIANT, Turn, run
from pydantic_ai import Agent


class Conversation:
    def __init__(self, number: int) -> None:
        self.agent = Agent(f"{VARIANT}:{MODEL}", instructions=INSTRUCTIONS)
        self.history: list[Any] = []
        self.turn = Turn()

        @self.agent.tool_plain
        def measure(pump: int) -> str:
            """Measure the water depth at a pump, in metres."""
            self.turn.measured.append(pump)
            return conversations.measure(pump)

    async def ask(self, text: str) -> Turn:
        self.turn = Turn()
        async with self.agent.run_stream(text, message_history=self.history) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                self.turn.pieces += 1
                self.turn.text += piece
            self.history = result.all_messages()
        return self.turn


run(Conversation)
