"""Starts to read KV events once an endpoint publishes them.

pyzmq is an optional dependency, so the modules that need it are imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.kv_events.prompt_learner import PromptLearner, Tokenizer
from gateway.metrics.catalogue import Metrics
from policies.routing_types import Endpoint

if TYPE_CHECKING:
    from gateway.fleet.kv_events.event_reader import KvEventReader


class KvEventService:
    """Starts to read KV events as soon as an endpoint has the setting `kv_events`.

    This may be at the start of the gateway, or after a reload that adds such an endpoint.
    """

    def __init__(
        self,
        endpoints: EndpointTable,
        metrics: Metrics,
        resolve: Callable[[str], Tokenizer | None],
    ) -> None:
        self._endpoints, self._metrics = endpoints, metrics
        results = metrics.prompts_learned_total
        self._learner = PromptLearner(endpoints.prefixes.exact, resolve, results)
        self._reader: KvEventReader | None = None

    def start_if_due(self) -> None:
        """Start to read KV events, unless reading has started or no endpoint publishes any."""
        if self._reader is not None or not any(
            live.spec.kv_events is not None for live in self._endpoints.all()
        ):
            return
        from gateway.fleet.kv_events.event_reader import KvEventReader

        exact = self._endpoints.prefixes.exact
        self._reader = KvEventReader(self._endpoints, exact, self._metrics)
        self._reader.start()
        self._learner.start()

    def find_tokenizer(
        self, slots: Collection[int], resolve_name: Callable[[Endpoint], str]
    ) -> Tokenizer | None:
        """Return the endpoints whose engines can tokenize prompts, to match KV events to them.

        Returns None if there are none.

        slots         slot numbers of the endpoints to choose from
        resolve_name  function that returns the name by which an endpoint's engine knows the model
        """
        exact = self._endpoints.prefixes.exact.endpoints
        lives = [
            live
            for live in self._endpoints.all()
            if live.load.slot in slots and live.load.slot in exact and live.load.is_available
        ]
        return Tokenizer(lives, resolve_name(lives[0].endpoint)) if lives else None

    async def stop(self) -> None:
        if self._reader is not None:
            await self._learner.stop()
            await self._reader.stop()
