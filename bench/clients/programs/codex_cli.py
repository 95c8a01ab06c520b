"""Client program of `make clients`: conversations with Codex.

Each turn is one process, which resumes the session.
"""

from __future__ import annotations

import agent_process
from conversations import KEY, MODEL, URL, Turn, measured_pump, run, shell_call

CONFIG = f"""
model = "{MODEL}"
model_provider = "penstock"
[model_providers.penstock]
name = "penstock"
base_url = "{URL}/v1"
env_key = "PENSTOCK_API_KEY"
"""
# The sandbox of the agent needs rights that a container may not have.
OPTIONS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
(agent_process.HOME / ".codex").mkdir()
(agent_process.HOME / ".codex" / "config.toml").write_text(CONFIG)


class Conversation:
    def __init__(self, number: int) -> None:
        self.thread = ""

    async def ask(self, text: str) -> Turn:
        resume = ("resume", self.thread) if self.thread else ()
        written = await agent_process.run_once(
            *("codex", "exec", *resume, *OPTIONS, "-"), text=text, PENSTOCK_API_KEY=KEY
        )
        turn = Turn()
        for line in written:
            if line["type"] == "thread.started":
                self.thread = line["thread_id"]
            item = line.get("item", {}) if line["type"] == "item.completed" else {}
            if item.get("type") == "agent_message":
                turn.text = item["text"]
            if item.get("type") == "command_execution":
                turn.measured.append(measured_pump(item["command"]))
        return turn


run(Conversation, shell_call("exec_command", "cmd"))
