"""Client program of `make clients`: conversations with LangChain.

It uses ChatOpenAI with chat completions. VARIANT=responses selects the Responses API, and
VARIANT=anthropic selects ChatAnthropic.
"""

from __future__ import annotations

from typing import Any

import conversations
from conversations import INSTRUCTIONS, KEY, MODEL, URL, VARIANT, Turn, run
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool


@tool
def measure(pump: int) -> str:
    """Measure the water depth at a pump, in metres."""
    return conversations.measure(pump)


def model() -> Any:
    if VARIANT == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model_name=MODEL, base_url=URL, api_key=KEY, timeout=60, stop=None)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=KEY,
        use_responses_api=VARIANT == "responses",
    )


class Conversation:
    def __init__(self, number: int) -> None:
        self.model = model().bind_tools([measure])
        self.messages: list[Any] = [SystemMessage(INSTRUCTIONS)]

    async def ask(self, text: str) -> Turn:
        turn = Turn()
        self.messages.append(HumanMessage(text))
        while not turn.text:
            answer: Any = None
            async for chunk in self.model.astream(self.messages):
                turn.pieces += bool(chunk.text)
                answer = chunk if answer is None else answer + chunk
            self.messages.append(answer)
            for call in answer.tool_calls:
                turn.measured.append(call["args"]["pump"])
                result = measure.invoke(call["args"])
                self.messages.append(ToolMessage(result, tool_call_id=call["id"]))
            turn.text = answer.text
        return turn


run(Conversation)
