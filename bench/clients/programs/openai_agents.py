"""Client program of `make clients`: conversations with OpenAI's Agents SDK.

It uses the Responses API, or chat completions with VARIANT=chat.
"""

from __future__ import annotations

import conversations
from agents import (
    Agent,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_default_openai_key,
    set_tracing_disabled,
)
from conversations import INSTRUCTIONS, KEY, MODEL, VARIANT, Turn, run

set_tracing_disabled(True)  # otherwise the SDK would send traces to OpenAI
set_default_openai_key(KEY)
if VARIANT == "chat":
    set_default_openai_api("chat_completions")


class Conversation:
    def __init__(self, number: int) -> None:
        self.memory = SQLiteSession(f"site-{number}")
        self.turn = Turn()

        @function_tool
        def measure(pump: int) -> str:
            """Measure the water depth at a pump, in metres."""
            self.turn.measured.append(pump)
            return conversations.measure(pump)

        self.agent = Agent(name="pumps", instructions=INSTRUCTIONS, model=MODEL, tools=[measure])

    async def ask(self, text: str) -> Turn:
        self.turn = Turn()
        result = Runner.run_streamed(self.agent, text, session=self.memory)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                self.turn.pieces += event.data.type == "response.output_text.delta"
        self.turn.text = str(result.final_output)
        return self.turn


run(Conversation)
