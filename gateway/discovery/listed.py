"""Endpoints by a file: a YAML or JSON list of URLs, or of mappings as under `endpoints`. Followed by its content.

A file that cannot be read, or has something wrong in it, changes nothing: what it said last stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gateway.config.tls import FOLDER
from gateway.config.tree import EndpointSpec, EndpointTraits
from gateway.discovery.source import MOST, Found, log

CAP_BYTES = 1 << 20
LOOK_S = 0.5
"""Between two looks. What is read counts once two looks in a row agree, so a file half written is not."""


class Listed:
    """One file."""

    def __init__(
        self, path: Path, traits: EndpointTraits, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._path, self._traits, self._sleep = path, traits, sleep
        self._failing = False

    async def watch(self) -> AsyncIterator[Found]:
        said: Found | None = None
        looked: bytes | None = None
        judged: bytes | None = None
        while True:
            before, looked = looked, await asyncio.to_thread(self._look)
            if looked is not None and looked != judged and (looked == before or judged is None):
                judged = looked
                found = await asyncio.to_thread(self._read, looked)
                if found is not None and found != said:
                    said = found
                    yield found
            await self._sleep(LOOK_S)

    def _look(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                text = file.read(CAP_BYTES + 1)
        except (OSError, ValueError) as error:  # no file can be called so
            if not self._failing:
                log.warning("%s cannot be read, whom it last named stay: %s", self._path, error)
            self._failing = True
            return None
        self._failing = False
        return text

    def _read(self, text: bytes) -> Found | None:
        """None, and a line in the log, when something is wrong in it."""
        try:
            if len(text) > CAP_BYTES:
                raise ValueError(f"it is longer than {CAP_BYTES} bytes")
            listed = YAML(typ="safe", pure=True).load(text.decode())
            if not isinstance(listed, list) or len(listed) > MOST:
                raise ValueError(f"it is no list of at most {MOST} endpoints")
            found = tuple(self._one(each) for each in listed)
            if len({each.url for each in found}) < len(found):
                raise ValueError("two of its endpoints have one url")
            if len({each.shown_name for each in found}) < len(found):
                raise ValueError("two of its endpoints have one name")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            log.warning("%s is not taken over: %s: %s", self._path, place, first["msg"])
        except YAMLError:
            log.warning("%s is not taken over: it is no YAML", self._path)
        except (ValueError, RecursionError) as error:
            log.warning("%s is not taken over: %s", self._path, error)
        else:
            return found
        return None

    def _one(self, listed: Any) -> EndpointSpec:
        own = {"url": listed} if isinstance(listed, str) else listed
        if not isinstance(own, dict):
            raise ValueError("an item is neither a url nor a mapping")
        like = {name: getattr(self._traits, name) for name in self._traits.model_fields_set}
        return EndpointSpec.model_validate(like | own, context={FOLDER: str(self._path.parent)})
