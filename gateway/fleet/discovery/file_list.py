"""Discovery by a file: a YAML or JSON list of endpoints.

Each item is a URL, or a mapping as under `endpoints` in the configuration. The file is read again
at intervals. While it cannot be read or is invalid, the endpoints of the last valid version stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gateway.config.endpoint_sections import EndpointSpec, EndpointTraits
from gateway.config.loader import problem_text
from gateway.config.tls_sections import FOLDER_KEY
from gateway.fleet.discovery.source_interface import MAX_ENDPOINTS, DiscoveredEndpoints, log
from gateway.util.work_in_turns import run_in_thread

_ENTRIES = ("pools", "", "endpoints")  # path of a list of endpoints in a configuration
FILE_CAP_BYTES = 1 << 20
POLL_S = 0.5
"""Seconds between two polls of the file.

A new content is used only after two polls in a row found it, so that a half-written file is not
used.
"""


class FileSource:
    """A discovery source that reads a list of endpoints from a file."""

    def __init__(
        self,
        path: Path,
        traits: EndpointTraits,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path, self._traits, self._sleep = path, traits, sleep
        self._is_failing = False

    async def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        yielded: DiscoveredEndpoints | None = None
        content: bytes | None = None
        parsed: bytes | None = None
        while True:
            before, content = content, await asyncio.to_thread(self._read)
            is_new = content is not None and content != parsed
            if content is not None and is_new and (content == before or parsed is None):
                parsed = content
                endpoints = await run_in_thread(partial(self._parse, content))
                if endpoints is not None and endpoints != yielded:
                    yielded = endpoints
                    yield endpoints
            await self._sleep(POLL_S)

    def _read(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_CAP_BYTES + 1)
        except (OSError, ValueError) as error:  # open() raises ValueError if the path is not valid
            if not self._is_failing:
                log.warning(
                    "service discovery: the file %s cannot be read, so its last known "
                    "endpoints stay: %s",
                    self._path,
                    error,
                )
            self._is_failing = True
            return None
        self._is_failing = False
        return content

    def _parse(self, content: bytes) -> DiscoveredEndpoints | None:
        # Return the endpoints listed in the file.
        #
        # Log the reason and return None if it is invalid.
        try:
            if len(content) > FILE_CAP_BYTES:
                raise ValueError(f"the file is longer than {FILE_CAP_BYTES} bytes")
            items = YAML(typ="safe", pure=True).load(content.decode())
            if not isinstance(items, list) or len(items) > MAX_ENDPOINTS:
                raise ValueError(
                    f"the file must contain a list of at most {MAX_ENDPOINTS} endpoints"
                )
            endpoints = tuple(self._parse_item(*item) for item in enumerate(items))
            if len({endpoint.url for endpoint in endpoints}) < len(endpoints):
                raise ValueError(
                    "the file lists two endpoints with the same url; remove one of them"
                )
            if len({endpoint.display_name for endpoint in endpoints}) < len(endpoints):
                raise ValueError(
                    "the file lists two endpoints with the same name; rename one of them"
                )
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f", line {mark.line + 1}" if mark is not None else ""
            log.warning(
                "service discovery: the file %s is ignored: it is not valid YAML%s",
                self._path,
                place,
            )
        except (ValueError, RecursionError) as error:
            log.warning("service discovery: the file %s is ignored: %s", self._path, error)
        else:
            return endpoints
        return None

    def _parse_item(self, index: int, item: Any) -> EndpointSpec:
        own = {"url": item} if isinstance(item, str) else item
        if not isinstance(own, dict):
            raise ValueError(f"entry {index + 1} must be a URL or a mapping with a url")
        shared = {name: getattr(self._traits, name) for name in self._traits.model_fields_set}
        try:
            return EndpointSpec.model_validate(
                shared | own, context={FOLDER_KEY: str(self._path.parent)}
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            text = problem_text(first, (*_ENTRIES, index, *first["loc"]))
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"entry {index + 1}, {name}: {text}") from None
