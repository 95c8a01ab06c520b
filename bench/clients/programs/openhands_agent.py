"""Client program of `make clients`: conversations with the agent of OpenHands' SDK, over
litellm.
"""

from __future__ import annotations

import asyncio
import tempfile

from conversations import KEY, MODEL, URL, Turn, measured_pump, run, shell_call
from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.event import ActionEvent, Event, MessageEvent
from openhands.sdk.tool import Tool
from openhands.tools.terminal import TerminalTool


class Site:
    def __init__(self, number: int) -> None:
        llm = LLM(model=f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY, stream=False)
        agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
        self.turn = Turn()
        self.conversation = Conversation(
            agent=agent,
            workspace=tempfile.mkdtemp(),
            callbacks=[self.on_event],
            visualizer=None,
        )

    def on_event(self, event: Event) -> None:
        if isinstance(event, ActionEvent) and event.tool_name == "terminal":
            self.turn.measured.append(measured_pump(event.action.command))
        if isinstance(event, MessageEvent) and event.source == "agent":
            self.turn.text = "".join(part.text for part in event.llm_message.content)

    async def ask(self, text: str) -> Turn:
        self.turn = Turn()
        self.conversation.send_message(text)
        await asyncio.to_thread(self.conversation.run)
        return self.turn


run(Site, shell_call("terminal", "command"))
