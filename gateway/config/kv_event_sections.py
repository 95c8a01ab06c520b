"""The configuration section `kv_events`: where an engine reports changes of its prefix cache."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from pydantic import StringConstraints, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from gateway.config.value_types import Bootstrap, Section, setting


def own_host(text: object, check: ValidatorFunctionWrapHandler) -> object:
    """Validate the address at which an engine publishes KV events, and return it.

    A bare port such as `:5557` means that port on the endpoint's own host. Raises ValueError if the
    address is invalid.
    """
    if isinstance(text, str) and text.startswith(":"):
        check(f"host{text}")
        return text
    return check(text)


EventAddress = Annotated[Bootstrap, WrapValidator(own_host)]


class KvEvents(Section):
    """Where an engine publishes KV events over ZeroMQ (vLLM and SGLang: --kv-events-config).

    A KV event reports that blocks of a prompt were cached or removed from the cache.
    """

    publisher: EventAddress | None = setting(
        None,
        "Address (host:port) at which the engine publishes KV events, or :port on the endpoint's "
        "own host. Data-parallel ranks after the first use the ports that follow. By default the "
        "gateway asks the engine (vLLM 0.33: /kv_event_sources, SGLang: /server_info).",
    )
    replay: EventAddress | None = setting(
        None,
        "Address (host:port or :port) from which missed KV events can be requested again. Without "
        "it, the gateway discards what it knows about a rank's cache after a lost message.",
    )
    topic: Annotated[str, StringConstraints(max_length=256)] = setting(
        "",
        "Topic prefix of the engine's KV event messages; by default messages of all topics are "
        "read.",
    )

    @model_validator(mode="after")
    def _is_usable(self) -> KvEvents:
        if self.publisher is None and (self.replay is not None or self.topic):
            raise ValueError(
                "replay and topic require publisher; without publisher, the gateway asks the "
                "engine for the addresses"
            )
        if find_spec("zmq") is None:
            raise ValueError(
                "KV events need the Python package pyzmq; install it with: pip "
                "install 'penstock[events]'"
            )
        return self
