"""Client program of `make clients`: conversations with LlamaIndex.

It uses OpenAILike, or OpenAIResponses or Anthropic if the environment variable VARIANT selects it.
"""

from __future__ import annotations

from typing import Any

import conversations
from conversations import INSTRUCTIONS, KEY, MODEL, URL, VARIANT, Turn, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool


def measure(pump: int) -> str:
    """Measure the water depth at a pump, in metres."""
    return conversations.measure(pump)


def model() -> Any:
    if VARIANT == "anthropic":
        from llama_index.llms.anthropic import Anthropic

        return Anthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=4096)
    if VARIANT == "responses":
        from llama_index.llms.openai import OpenAIResponses

        return OpenAIResponses(
            model=MODEL, api_base=f"{URL}/v1", api_key=KEY, context_window=100_000
        )
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
    )


class Conversation:
    def __init__(self, number: int) -> None:
        self.model = model()
        self.tools = [FunctionTool.from_defaults(measure)]
        self.messages = [ChatMessage(role="system", content=INSTRUCTIONS)]

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.messages.append(ChatMessage(role="user", content=text))
        while not turn.text:
            stream = await self.model.astream_chat_with_tools(
                self.tools, chat_history=self.messages
            )
            answer: Any = None
            async for answer in stream:
                turn.pieces += bool(answer.delta)
            self.messages.append(answer.message)
            calls = self.model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
            for call in calls:
                turn.measured.append(call.tool_kwargs["pump"])
                result = measure(**call.tool_kwargs)
                self.messages.append(
                    ChatMessage(
                        role="tool",
                        content=result,
                        additional_kwargs={"tool_call_id": call.tool_id, "name": call.tool_name},
                    )
                )
            turn.text = "" if calls else answer.message.content or ""
        return turn


run(Conversation)
