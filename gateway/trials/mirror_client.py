"""Sends a mirror's copies of requests to engines, on separate connections."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from gateway.fleet.live_endpoint import LiveEndpoint
from policies.golden.answers import GoldenAnswer, answer_of, request_of

TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
TOP = 5  # likeliest tokens whose probabilities are requested


class MirroredAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to a copy, and its number of tokens; 0 if the engine reports none."""

    answer: GoldenAnswer
    tokens: int = 0


class MirrorClient:
    """An HTTP client that sends copies of requests. It opens its session at the first request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        live: LiveEndpoint,
        path: str,
        prompt: Mapping[str, Any],
        model: str | None,
        salt: bytes,
    ) -> MirroredAnswer:
        """Send a copy of a request to an endpoint, at temperature 0, and return the answer.

        The answer has token probabilities if the engine reports them.

        model  the engine's name of the model; None or an unlisted name: the first model that the
               engine lists
        salt   the client's cache salt, for engines that accept one
        """
        name = model if model and model in live.models else next(iter(live.models), model or "")
        spent = 0
        for top in (TOP, 0):
            body = {**request_of({}, name, 1, top), **prompt, "temperature": 0, "model": name}
            if top and "messages" in prompt:
                body |= {"logprobs": True, "top_logprobs": top}
            if salt and live.endpoint.salt_member:
                body[live.endpoint.salt_member] = salt.decode()
            status, answer, tokens = await self._post(live, path, body)
            spent += tokens
            if status != 400 or not top:
                return MirroredAnswer(answer, spent)
        raise AssertionError(
            "unreachable: the second attempt, without log probabilities, always returns an answer"
        )

    async def _post(
        self, live: LiveEndpoint, path: str, body: Mapping[str, Any]
    ) -> tuple[int, GoldenAnswer, int]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), auto_decompress=False
            )
        began, url = monotonic(), live.endpoint.url.rstrip("/") + path
        encryption = live.encryption
        context: Any = True if encryption is None else encryption.context
        try:
            async with self._session.post(
                url,
                json=body,
                headers=live.key_header,
                ssl=context,
                server_hostname=None if encryption is None else encryption.server_name,
                allow_redirects=False,
            ) as response:
                raw = await response.content.read(MAX_ANSWER_BYTES)
                while len(raw) < MAX_ANSWER_BYTES and not response.content.at_eof():
                    raw += await response.content.read(MAX_ANSWER_BYTES - len(raw))
                if response.status != 200:
                    return response.status, GoldenAnswer(error=f"status {response.status}"), 0
                decoded = msgspec.json.decode(raw)
                usage = decoded.get("usage") or {}
                tokens = int(usage.get("total_tokens") or 0)
                return 200, answer_of(decoded, monotonic() - began), tokens
        except (TimeoutError, aiohttp.ClientError, ValueError, AttributeError) as error:
            return 0, GoldenAnswer(error=type(error).__name__), 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
