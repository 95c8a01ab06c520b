"""Detects to which router a configuration text or a command line belongs, and converts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.migrate import (
    litellm,
    llmd,
    llmd_chart,
    vllm_production_stack,
    vllm_production_stack_chart,
    vllm_sglang_router,
)
from gateway.migrate.command_options import (
    CommandOptions,
    split_words,
    without_redirections,
)
from gateway.migrate.config_draft import Additions, Draft, MigrationError
from gateway.migrate.yaml_text import load_documents

SOURCES = ("vllm-router", "sglang-router", "production-stack", "litellm", "llm-d")
"""Names of the kinds of sources; sglang-router includes SMG."""

_PROGRAMS: Mapping[str, str] = {
    "amg": "sglang-router",
    "litellm": "litellm",
    "sgl-model-gateway": "sglang-router",
    "sglang-router": "sglang-router",
    "sglang_router": "sglang-router",
    "sglang_router.launch_router": "sglang-router",
    "sglang_router.launch_server": "sglang-router",
    "smg": "sglang-router",
    "vllm-router": "vllm-router",
    "vllm_router.app": "production-stack",
    "vllm_router.launch_router": "vllm-router",
}
# The production stack installs its router under the same name as vllm-project/router.
_STACK_OPTIONS = ("routing-logic", "static-backends", "k8s-label-selector", "dynamic-config-yaml")
_SEPARATORS = frozenset({";", "&", "&&", "|", "||"})
_SHAPES = ("model_list", "routerSpec", "servingEngineSpec", "routing_logic", "service_discovery")


def convert_words(words: Sequence[str], source: str | None, additions: Additions) -> Draft:
    """Convert another router's command line to the draft of a gateway.yaml.

    `source` names the router; None: it is detected from the program's name. Raises MigrationError.
    """
    program, options = _command(words)
    kind = source or program
    if kind == "vllm-router" and source is None and any(name in options for name in _STACK_OPTIONS):
        kind = "production-stack"
    draft = Draft(additions)
    if kind == "vllm-router":
        vllm_sglang_router.convert(options, draft, vllm_sglang_router.VLLM_ROUTER)
    elif kind == "sglang-router":
        vllm_sglang_router.convert(options, draft, vllm_sglang_router.SGLANG_ROUTER)
    elif kind == "production-stack":
        vllm_production_stack.convert(options, draft)
    elif kind is None:
        raise MigrationError(
            f"the command line belongs to no known router; name the router with --from: {_known()}"
        )
    else:
        raise MigrationError(f"{kind} is configured by a file; give the path of the file")
    return draft


def convert_text(text: str, source: str | None, additions: Additions) -> Draft:
    """Convert another router's file (YAML, JSON, or shell commands) to the draft of a gateway.yaml.

    `source` names the router; None: it is detected from the content. Raises MigrationError.
    """
    try:
        documents = load_documents(text)
    except MigrationError:
        if source in ("litellm", "llm-d"):
            raise
        documents = []
    mappings = [document for document in documents if isinstance(document, dict)]
    for document in _unpacked(mappings):
        if (draft := _convert_document(document, source, additions)) is not None:
            return draft
    commands = list(_container_commands(mappings)) if mappings else list(_shell_commands(text))
    for words in commands:
        if _command(words)[0] is not None:
            return convert_words(words, source, additions)
    if source is not None and commands and not mappings:
        return convert_words(commands[-1], source, additions)
    raise MigrationError(
        f"the text belongs to no known router; name the router with --from: {_known()}"
    )


def _convert_document(
    document: Mapping[str, Any], source: str | None, additions: Additions
) -> Draft | None:
    # Convert one document; return None if it is not the configuration of a router.
    draft = Draft(additions)
    if "model_list" in document and source in (None, "litellm"):
        litellm.convert(document, draft)
    elif document.get("kind") == "EndpointPickerConfig" and source in (None, "llm-d"):
        llmd.convert(document, draft, llmd.Target())
    elif llmd_chart.is_chart(document) and source in (None, "llm-d"):
        llmd_chart.convert_values(document, draft)
    elif source not in (None, "production-stack"):
        return None
    elif "routerSpec" in document or "servingEngineSpec" in document:
        vllm_production_stack_chart.convert_values(document, draft)
    elif "routing_logic" in document or "service_discovery" in document:
        vllm_production_stack.convert_settings(document, draft)
    else:
        return None
    return draft


def _unpacked(documents: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        yield document
        if document.get("kind") == "ConfigMap":
            for text in (document.get("data") or {}).values():
                for inner in load_documents(str(text)):
                    if isinstance(inner, dict):
                        yield inner
        elif not any(shape in document for shape in _SHAPES):
            yield from (
                inner
                for inner in document.values()
                if isinstance(inner, dict) and llmd_chart.is_chart(inner)
            )


def _container_commands(data: object) -> Iterator[list[str]]:
    if isinstance(data, list):
        for item in data:
            yield from _container_commands(item)
    elif isinstance(data, dict):
        words: list[str] = []
        for key in ("entrypoint", "command", "args"):
            value = data.get(key)
            words += split_words(value) if isinstance(value, str) else map(str, value or ())
        if words:
            yield [str(data.get("image", "")).rpartition("/")[2].partition(":")[0], *words]
        for value in data.values():
            if isinstance(value, dict | list):
                yield from _container_commands(value)


def _shell_commands(text: str) -> Iterator[list[str]]:
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = split_words(pending)
        except MigrationError:  # a quoted text continues in the next line
            pending += "\n"
            continue
        pending, command = "", list[str]()
        for word in words:
            if word in _SEPARATORS:
                yield without_redirections(command)
                command = []
            else:
                command.append(word)
        if command:
            yield without_redirections(command)
    if pending.strip():
        raise MigrationError("a quote in the shell commands is never closed")


def _command(words: Sequence[str]) -> tuple[str | None, CommandOptions]:
    if words and words[0] == "cd":  # the folder may have the name of a router
        return None, CommandOptions()
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _PROGRAMS:
            prefix = "router-" if name == "sglang_router.launch_server" else ""
            return _PROGRAMS[name], CommandOptions.parse(words[index + 1 :], prefix)
        if word.startswith("--"):
            break
    return None, CommandOptions.parse(words)


def _known() -> str:
    return ", ".join(SOURCES)
