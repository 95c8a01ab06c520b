"""Lists the client programs that `make clients` tests with the gateway, and how each is run.

Each client is given only a base URL, an API key and a model name, as its documentation describes.
"""

from __future__ import annotations

from typing import NamedTuple

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class ClientSpec(NamedTuple):
    """A client program that `make clients` tests, in one configuration.

    name      name of the program, as users know it
    api       path of the API that it calls
    runtime   folder of its environment in build/clients; `node` for npm packages
    program   file in bench/clients/programs that runs it
    packages  packages whose versions are reported
    variant   value of VARIANT, which selects an API or a provider
    model     name of the model, if the client accepts only certain names
    session   how the gateway identifies sessions, as in its access log, such as "prefix"
    """

    name: str
    api: str
    runtime: str
    program: str
    packages: tuple[str, ...]
    variant: str = ""
    model: str = "demo-8b"
    session: str = "prefix"


_AGENTS, _LLAMA = "openai-agents", "llama-index"
CATALOGUE = (
    ClientSpec("openai, Python", CHAT, "python", "openai_sdk.py", ("openai",)),
    ClientSpec("openai, Python", RESPONSES, "python", "openai_sdk.py", ("openai",), "responses"),
    ClientSpec(
        "openai, Python, turns stored",
        RESPONSES,
        "python",
        "openai_sdk.py",
        ("openai",),
        "stored",
        session="previous_response_id",
    ),
    ClientSpec("openai, Node", CHAT, "node", "openai_node.mjs", ("openai",)),
    ClientSpec("openai, Node", RESPONSES, "node", "openai_node.mjs", ("openai",), "responses"),
    ClientSpec("anthropic, Python", MESSAGES, "python", "anthropic_sdk.py", ("anthropic",)),
    ClientSpec("anthropic, Node", MESSAGES, "node", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    ClientSpec("OpenAI Agents, Python", RESPONSES, "python", "openai_agents.py", (_AGENTS,)),
    ClientSpec("OpenAI Agents, Python", CHAT, "python", "openai_agents.py", (_AGENTS,), "chat"),
    ClientSpec(
        "OpenAI Agents, Node", RESPONSES, "node", "openai_agents_node.mjs", ("@openai/agents",)
    ),
    ClientSpec(
        "OpenAI Agents, Node", CHAT, "node", "openai_agents_node.mjs", ("@openai/agents",), "chat"
    ),
    *(
        ClientSpec(
            "pydantic-ai", api, "python", "pydantic_ai_agent.py", ("pydantic-ai-slim",), variant
        )
        for api, variant in (
            (RESPONSES, "openai"),
            (CHAT, "openai-chat"),
            (MESSAGES, "anthropic"),
        )
    ),
    *(
        ClientSpec("LangChain, Python", api, "python", "langchain_chat.py", (package,), variant)
        for api, package, variant in (
            (CHAT, "langchain-openai", ""),
            (RESPONSES, "langchain-openai", "responses"),
            (MESSAGES, "langchain-anthropic", "anthropic"),
        )
    ),
    ClientSpec("LangChain, Node", CHAT, "node", "langchain_node.mjs", ("@langchain/openai",)),
    ClientSpec(
        "LangChain, Node",
        RESPONSES,
        "node",
        "langchain_node.mjs",
        ("@langchain/openai",),
        "responses",
    ),
    ClientSpec(
        "LlamaIndex", CHAT, _LLAMA, "llama_index_chat.py", ("llama-index-llms-openai-like",)
    ),
    ClientSpec(
        "LlamaIndex",
        RESPONSES,
        _LLAMA,
        "llama_index_chat.py",
        ("llama-index-llms-openai",),
        "responses",
    ),
    ClientSpec(
        "LlamaIndex",
        MESSAGES,
        _LLAMA,
        "llama_index_chat.py",
        ("llama-index-llms-anthropic",),
        "anthropic",
        "claude-sonnet-5",
    ),
    ClientSpec("litellm", CHAT, "python", "litellm_chat.py", ("litellm",)),
    ClientSpec("litellm", MESSAGES, "python", "litellm_chat.py", ("litellm",), "anthropic"),
    *(
        ClientSpec("AI SDK", api, "node", "ai_sdk.mjs", ("ai", package), variant)
        for api, package, variant in (
            (RESPONSES, "@ai-sdk/openai", "openai"),
            (CHAT, "@ai-sdk/openai-compatible", "compatible"),
            (MESSAGES, "@ai-sdk/anthropic", "anthropic"),
        )
    ),
    ClientSpec(
        "Claude Code",
        MESSAGES,
        "node",
        "claude_code.py",
        ("@anthropic-ai/claude-code",),
        session="x-claude-code-session-id",
    ),
    ClientSpec(
        "Codex", RESPONSES, "node", "codex_cli.py", ("@openai/codex",), session="session-id"
    ),
    ClientSpec(
        "OpenCode", CHAT, "node", "opencode_cli.py", ("opencode-ai",), session="x-session-affinity"
    ),
    ClientSpec(
        "OpenHands",
        CHAT,
        "openhands",
        "openhands_agent.py",
        ("openhands-sdk",),
        session="x-litellm-session-id",
    ),
)
