"""Reads what an engine can do: its models, its APIs, and whether it stores responses.

model_list_reader.py reads the list of models.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from gateway.config import Config
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_list_changes import ModelListNews
from gateway.fleet.model_list_reader import ModelListReader
from gateway.fleet.probe_errors import PROBE_ERRORS
from gateway.fleet.probe_requests import METRICS_LIMIT, NO_PAGE, ProbeRequests, known_model
from gateway.protocol.api_table import RESPONSES, api_paths
from gateway.protocol.response_store_probe import shows_store, store_request
from gateway.protocol.translate.translation_table import TRANSLATIONS
from policies.engine_kinds import ENGINE_TRAITS

MODELS_EVERY_S = 30.0
API_TRIAL_S = 0.5  # timeout of a request that shows whether an engine serves an API


class EngineCapabilities:
    """Reads the models and APIs of engines, and stores them in the live endpoints.

    config  the running configuration
    """

    def __init__(self, config: Config, requests: ProbeRequests, news: ModelListNews) -> None:
        self.config = config
        self._requests = requests
        self._news = news
        self._reader = ModelListReader(requests, news)

    async def read_if_due(self, live: LiveEndpoint) -> None:
        """Read what the engine can do, unless that was done a short time ago."""
        if live.models_at is None or monotonic() - live.models_at >= MODELS_EVERY_S:
            await self.read(live, limit_s=self.config.health.timeout)

    async def read(self, live: LiveEndpoint, *, limit_s: float) -> None:
        """Read the models that the engine lists, then unknown facts about its APIs and responses.

        Without a list, nothing else is read.
        """
        if not await self._reader.read(live, limit_s):
            return
        if not live.api_paths:
            await self._list_apis(live, limit_s)
        await self._learn_store(live, limit_s)

    async def _list_apis(self, live: LiveEndpoint, limit_s: float) -> None:
        # Read the API paths that /openapi.json of the engine lists.
        #
        # Without that page, try_apis_if_due() tries those that can be translated.
        status, text = await self._requests.get(live, "/openapi.json", limit_s)
        if status == 200 and (paths := api_paths(text)):
            live.api_paths = paths
            self._news.on_changed()

    async def try_apis_if_due(self, live: LiveEndpoint) -> None:
        """Find out which translatable APIs an engine lacks, if it does not list its APIs.

        Each API gets a request with an empty JSON object, which engines refuse without generating
        anything. The APIs are tried once; after an ejection of the endpoint, they are tried again.
        """
        if live.has_tried_apis or live.api_paths or not live.has_list:
            return
        live.has_tried_apis = True
        lacked, missing = ENGINE_TRAITS[live.endpoint.engine].lacked_paths, set[str]()
        for path in TRANSLATIONS.keys() - lacked:
            with suppress(*PROBE_ERRORS):
                status, _ = await self._requests.fetch(live, path, API_TRIAL_S, METRICS_LIMIT, {})
                if status in NO_PAGE:
                    missing.add(path)
        if missing != live.missing_paths:
            live.missing_paths = frozenset(missing)
            self._news.on_changed()

    async def _learn_store(self, live: LiveEndpoint, limit_s: float) -> None:
        # Find out whether the engine stores responses, if it is unknown and matters to the pool.
        #
        # The pool needs to know it if requests are split or resumed, because they are sent as
        # chats.
        name = known_model(live)
        if live.keeps_responses is not None or name is None or RESPONSES.path not in live.api_paths:
            return
        models = (model for model in self.config.models if model.pool == live.endpoint.pool)
        if not any(model.split or model.resume for model in models):
            return
        body = store_request(name)
        with suppress(*PROBE_ERRORS):
            response = await self._requests.fetch(
                live, RESPONSES.path, limit_s, METRICS_LIMIT, body
            )
            live.keeps_responses = shows_store(*response)
