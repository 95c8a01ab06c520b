"""Client program of `make clients`: conversations with Anthropic's SDK over the Messages API."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from conversations import (
    INSTRUCTIONS,
    KEY,
    MODEL,
    TOOL_NAME,
    TOOL_SCHEMA,
    TOOL_TEXT,
    URL,
    Turn,
    measure,
    run,
)

CLIENT = AsyncAnthropic(base_url=URL, api_key=KEY)
TOOL: Any = {"name": TOOL_NAME, "description": TOOL_TEXT, "input_schema": TOOL_SCHEMA}


class Messages:
    def __init__(self, number: int) -> None:
        self.messages: list[Any] = []

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.messages.append({"role": "user", "content": text})
        while not turn.text:
            async with CLIENT.messages.stream(
                model=MODEL,
                max_tokens=4096,
                system=INSTRUCTIONS,
                messages=self.messages,
                tools=[TOOL],
            ) as stream:
                async for event in stream:
                    turn.pieces += event.type == "text"
                message = await stream.get_final_message()
            content = [block.model_dump(exclude_none=True) for block in message.content]
            self.messages.append({"role": "assistant", "content": content})
            results = []
            for block in message.content:
                if block.type == "tool_use":
                    pump = block.input["pump"]
                    turn.measured.append(pump)
                    result = {"type": "tool_result", "tool_use_id": block.id}
                    results.append(result | {"content": measure(pump)})
                elif block.type == "text":
                    turn.text += block.text
            if results:
                self.messages.append({"role": "user", "content": results})
        return turn


run(Messages)
