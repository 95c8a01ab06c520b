"""The configuration section for the KV events that an engine publishes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from pydantic import StringConstraints, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from gateway.config.values import Bootstrap, Section, setting


def own_host(text: object, check: ValidatorFunctionWrapHandler) -> object:
    """Validate the address at which an engine publishes KV events, and return it.

    A port alone, such as `:5557`, means this port of the endpoint's own host.
    """
    if isinstance(text, str) and text.startswith(":"):
        check(f"host{text}")
        return text
    return check(text)


EventAddress = Annotated[Bootstrap, WrapValidator(own_host)]


class KvEvents(Section):
    """KV events that an engine publishes over ZeroMQ (vLLM and SGLang: --kv-events-config)."""

    publisher: EventAddress | None = setting(
        None,
        "Address (host:port) of the engine's publisher of KV events, or :port on the endpoint's "
        "own host; further data-parallel ranks have the following ports. By default the engine is "
        "asked (vLLM 0.33: /kv_event_sources, SGLang: /server_info).",
    )
    replay: EventAddress | None = setting(
        None,
        "Address (host:port or :port) of the engine's socket for replays of KV events; without "
        "one, a lost message empties what is known of the rank's cache.",
    )
    topic: Annotated[str, StringConstraints(max_length=256)] = setting(
        "",
        "Topic with which the engine's KV event messages begin; by default messages of all "
        "topics are read.",
    )

    @model_validator(mode="after")
    def _is_usable(self) -> KvEvents:
        if self.publisher is None and (self.replay is not None or self.topic):
            raise ValueError(
                "replay and topic require publisher; without publisher the engine "
                "is asked for these addresses"
            )
        if find_spec("zmq") is None:
            raise ValueError(
                "KV events need the Python package pyzmq; install it with: pip "
                "install 'penstock[events]'"
            )
        return self
