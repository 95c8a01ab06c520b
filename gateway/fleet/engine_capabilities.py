"""Reads what an engine can do: its list of models, its APIs, and whether it stores responses."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from time import monotonic

from gateway.config import Config
from gateway.fleet.engine_requests import METRICS_LIMIT, EngineRequests, known_model
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_list_changes import ModelListNews
from gateway.fleet.probe_errors import PROBE_ERRORS
from gateway.protocol.api_table import RESPONSES, api_paths
from gateway.protocol.response.http_response_parser import FramingError
from gateway.protocol.response_store_probe import shows_store, store_request
from gateway.protocol.translate.translation_table import TRANSLATIONS
from policies.engine_kinds import ENGINE_TRAITS, MODELS_PATH

log = logging.getLogger("penstock")

MODELS_EVERY_S = 30.0
API_TRIAL_S = 0.5  # timeout of a request that shows whether an engine serves an API
NO_PAGE = (404, 405, 501)  # statuses of an engine without the requested page
RATE_LIMITED = 429


class EngineCapabilities:
    """Reads the models and APIs of engines, and stores them in the live endpoints.

    config  the running configuration
    """

    def __init__(self, config: Config, requests: EngineRequests, news: ModelListNews) -> None:
        self.config = config
        self._requests = requests
        self._model_lists = news

    async def list_models_if_due(self, live: LiveEndpoint) -> None:
        """Read which models the engine lists, unless that was done a short time ago."""
        if live.models_at is None or monotonic() - live.models_at >= MODELS_EVERY_S:
            await self.list_models(live, limit_s=self.config.health.timeout)

    async def list_models(self, live: LiveEndpoint, *, limit_s: float) -> None:
        """Read which models the engine lists; without a response, the last list stays valid.

        If the list is new, the APIs that the engine serves are read too.
        """
        try:
            status, text = await self._requests.fetch(live, MODELS_PATH, limit_s, METRICS_LIMIT)
        except FramingError as error:
            _report_unreadable_list(live, str(error))
            return
        except PROBE_ERRORS:
            return
        names: tuple[str, ...] = ()
        if status == 200:
            try:
                cards = json.loads(text)["data"]
                # Ollama writes null for an empty list.
                names = tuple(str(card["id"]) for card in (() if cards is None else cards))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                _report_unreadable_list(live, f"not a list of models: {error!r}")
                return
        elif status not in NO_PAGE:
            if 400 <= status < 500 and status != RATE_LIMITED:
                _report_unreadable_list(live, f"the engine answered {status}")
            return
        is_first, live.models_at, live.has_bad_list = live.models_at is None, monotonic(), False
        if is_first or (names, status == 200) != (live.models, live.has_list):
            live.models, live.has_list = names, status == 200
            self._model_lists.on_changed()
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
            self._model_lists.on_changed()

    async def try_apis_if_due(self, live: LiveEndpoint) -> None:
        """Find out which translatable APIs an engine lacks, if it does not list its APIs.

        An engine that has an API refuses a request without members, and generates nothing. One that
        fails instead is not asked again until it returns from an ejection.
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
            self._model_lists.on_changed()

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


def _report_unreadable_list(live: LiveEndpoint, reason: str) -> None:
    # Log once that an engine's list of models cannot be read.
    if not live.has_bad_list:
        live.has_bad_list = True
        log.warning(
            "the list of models of endpoint %s cannot be read (%s%s): %.200s",
            live.endpoint.name,
            live.endpoint.url,
            MODELS_PATH,
            reason,
        )
