"""Lets engines tokenize prompts in the background, so that KV events can be matched to prompts.

KV events contain token ids, while clients send text. Only a few prompts are tokenized at a time, so
that engines spend little work on it. If a prompt cannot be tokenized, the prefix index predicts its
cached tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.kv_events.tokenization import (
    TOKENIZE_PATH,
    UnreadPrompt,
    given_tokens,
    parse_tokens,
    tokenize_body,
)
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.http.engine_poll_client import ConnectError, ConnectionLostError, PollClient
from gateway.metrics.metric_types import Counter, MetricFamily
from gateway.protocol.response.http_response_parser import FramingError

log = logging.getLogger("penstock")

PAUSE_S = 0.02
TIMEOUT_S = 5.0
FAILURE_PAUSE_S = 1.0
MAX_RESPONSE_BYTES = 32 * 1024 * 1024
WORKERS = 4


class Tokenizer(msgspec.Struct, frozen=True):
    """The endpoints whose engines can tokenize prompts for a model, and their name of the model."""

    endpoints: Sequence[LiveEndpoint]
    engine_model: str


class PromptLearner:
    """Lets engines tokenize the queued prompts (ExactPrefixes.unread), a few at a time.

    No other class takes prompts from that queue.
    """

    def __init__(
        self,
        exact: ExactPrefixes,
        resolve: Callable[[str], Tokenizer | None],
        results: MetricFamily[Counter],
    ) -> None:
        """Prepare to have prompts tokenized; nothing is sent until the learner is started.

        exact    the index that queues the prompts and stores their tokens
        resolve  function that returns the endpoints that can tokenize for a model; None if no
                 endpoint has KV events
        results  metric that counts prompts by result
        """
        self._exact, self._resolve, self._results = exact, resolve, results
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: dict[LiveEndpoint, PollClient] = {}

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._work(), name="learn prompts") for _ in range(WORKERS)
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            client.close()

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            while self._exact.unread:
                try:
                    is_learned = await self._learn_oldest()
                except Exception:  # one prompt must not end the learning of others
                    log.exception("learning the tokens of a prompt for KV events failed")
                    is_learned = False
                if is_learned is None:
                    break
                self._results.labels("learned" if is_learned else "failed").inc()
                if not is_learned:
                    await asyncio.sleep(FAILURE_PAUSE_S)

    async def _learn_oldest(self) -> bool | None:
        # Learn the oldest prompt that can be; return whether that worked, None if none can be.
        exact, found = self._exact, self._find_oldest()
        if found is None:
            return None
        index, tokenizer, sizes = found
        prompt = exact.take_unread(index)
        if tokenizer is None:
            return True
        if exact.prompts.has(prompt.fingerprint):
            return True
        tokens = given_tokens(prompt)
        self._drop_old_clients()
        live = min(tokenizer.endpoints, key=lambda live: live.load.in_flight)
        if tokens is None:
            tokens = await self._tokenize(live, prompt, tokenizer.engine_model)
        if tokens is None:
            return False
        salt = prompt.salt.decode() if live.endpoint.salt_member else ""
        exact.learn(prompt.fingerprint, tokens, sizes, tokenizer.engine_model, salt)
        return True

    def _find_oldest(self) -> tuple[int, Tokenizer | None, set[int]] | None:
        # Return the index of the oldest prompt that can be learned, who tokenizes it, and the sizes
        # of blocks to learn it for. Prompts of models whose sizes are not known yet wait.
        waiting: set[str] = set()
        for index, prompt in enumerate(self._exact.unread):
            if prompt.model in waiting:
                continue
            tokenizer = self._resolve(prompt.model)
            if tokenizer is None:
                return index, None, set()
            slots = [live.load.slot for live in tokenizer.endpoints]
            if sizes := self._exact.block_sizes(slots):
                return index, tokenizer, sizes
            waiting.add(prompt.model)
        return None

    def _drop_old_clients(self) -> None:
        for live in [live for live in self._clients if live.is_leaving]:
            self._clients.pop(live).close()

    async def _tokenize(
        self, live: LiveEndpoint, prompt: UnreadPrompt, engine_model: str
    ) -> list[int] | None:
        # Ask the engine for the tokens; None if it does not report them.
        client = self._clients.setdefault(live, PollClient(live.spec.url))
        client.configure(live.key_header, live.encryption)
        body = tokenize_body(prompt, engine_model)
        try:
            response = await client.post(TOKENIZE_PATH, body, TIMEOUT_S, MAX_RESPONSE_BYTES)
        except (ConnectError, ConnectionLostError, FramingError, TimeoutError, OSError):
            return None
        return parse_tokens(*response)
