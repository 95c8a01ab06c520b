"""Client program of `make clients`: conversations with OpenAI's SDK.

It uses chat completions, or the Responses API if the environment variable VARIANT selects it. A
stored response can be continued by its identifier.
"""

from __future__ import annotations

import json
from typing import Any

from conversations import (
    INSTRUCTIONS,
    KEY,
    MODEL,
    TOOL_NAME,
    TOOL_SCHEMA,
    TOOL_TEXT,
    URL,
    VARIANT,
    Turn,
    measure,
    run,
)
from openai import AsyncOpenAI, omit

CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
FUNCTION: Any = {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": TOOL_SCHEMA}


class Chat:
    def __init__(self, number: int) -> None:
        self.messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.messages.append({"role": "user", "content": text})
        while not turn.text:
            tools: Any = [{"type": "function", "function": FUNCTION}]
            async with CLIENT.chat.completions.stream(
                model=MODEL, messages=self.messages, tools=tools
            ) as stream:
                async for event in stream:
                    turn.pieces += event.type == "content.delta"
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                pump = json.loads(call.function.arguments)["pump"]
                turn.measured.append(pump)
                self.messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": measure(pump)}
                )
            turn.text = message.content or ""
        return turn


class Responses:
    def __init__(self, number: int) -> None:
        self.items: list[Any] = []
        self.previous: str | None = None

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.items.append({"role": "user", "content": text})
        while not turn.text:
            tool: Any = {"type": "function", "strict": True, **FUNCTION}
            async with CLIENT.responses.stream(
                model=MODEL,
                instructions=INSTRUCTIONS,
                input=self.items,
                tools=[tool],
                previous_response_id=self.previous or omit,
            ) as stream:
                async for event in stream:
                    turn.pieces += event.type == "response.output_text.delta"
                response = await stream.get_final_response()
            if VARIANT == "stored":
                self.items, self.previous = [], response.id
            for item in response.output:
                if self.previous is None:
                    self.items.append(
                        item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                    )
                if item.type == "function_call":
                    pump = json.loads(item.arguments)["pump"]
                    turn.measured.append(pump)
                    output = {"type": "function_call_output", "call_id": item.call_id}
                    self.items.append(output | {"output": measure(pump)})
            turn.text = response.output_text
        return turn


run(Responses if VARIANT else Chat)
