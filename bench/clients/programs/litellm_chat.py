"""Client program of `make clients`: conversations with litellm.

The environment variable VARIANT selects the API:

anthropic  the Messages API (model `anthropic/NAME`)
responses  the Responses API
not set    chat completions (model `openai/NAME`)
"""

from __future__ import annotations

import json
from typing import Any

import litellm
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

FUNCTION: Any = {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": TOOL_SCHEMA}
NAME = f"anthropic/{MODEL}" if VARIANT == "anthropic" else f"openai/{MODEL}"
BASE = URL if VARIANT == "anthropic" else f"{URL}/v1"


class Chat:
    def __init__(self, number: int) -> None:
        self.messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.messages.append({"role": "user", "content": text})
        while not turn.text:
            stream = await litellm.acompletion(
                model=NAME,
                api_base=BASE,
                api_key=KEY,
                messages=self.messages,
                tools=[{"type": "function", "function": FUNCTION}],
                stream=True,
                max_tokens=4096,  # without it, LiteLLM requests 128,000 tokens from Anthropic's API
            )
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                turn.pieces += bool(chunk.choices and chunk.choices[0].delta.content)
            message: Any = litellm.stream_chunk_builder(chunks).choices[0].message
            self.messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                pump = json.loads(call.function.arguments)["pump"]
                turn.measured.append(pump)
                self.messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": measure(pump)}
                )
            turn.text = message.content or ""
        return turn


run(Chat)
