"""Reads the list of models of an engine (/v1/models), and logs a list that cannot be read.

served_models.py decides by these lists which endpoints serve a model. model_list_changes.py reports
changes.
"""

from __future__ import annotations

import json
import logging
from time import monotonic

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_list_changes import ModelListNews
from gateway.fleet.probe_errors import PROBE_ERRORS
from gateway.fleet.probe_requests import METRICS_LIMIT, NO_PAGE, RATE_LIMITED, ProbeRequests
from gateway.protocol.response.http_response_parser import FramingError
from policies.engine_kinds import MODELS_PATH

log = logging.getLogger("penstock")


class ModelListReader:
    """Reads the lists of models of engines, and stores them in the live endpoints."""

    def __init__(self, requests: ProbeRequests, news: ModelListNews) -> None:
        self._requests = requests
        self._news = news

    async def read(self, live: LiveEndpoint, limit_s: float) -> bool:
        """Read which models the engine lists; without a response, the last list stays valid.

        Returns whether the engine sent its list, or answered that it has none.
        """
        try:
            status, text = await self._requests.fetch(live, MODELS_PATH, limit_s, METRICS_LIMIT)
        except FramingError as error:
            _report_unreadable_list(live, str(error))
            return False
        except PROBE_ERRORS:
            return False
        names: tuple[str, ...] = ()
        if status == 200:
            try:
                names = model_names(text)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                _report_unreadable_list(live, f"not a list of models: {error!r}")
                return False
        elif status not in NO_PAGE:
            if 400 <= status < 500 and status != RATE_LIMITED:
                _report_unreadable_list(live, f"the engine answered {status}")
            return False
        is_first, live.models_at, live.has_bad_list = live.models_at is None, monotonic(), False
        if is_first or (names, status == 200) != (live.models, live.has_list):
            live.models, live.has_list = names, status == 200
            self._news.on_changed()
        return True


def model_names(text: bytes) -> tuple[str, ...]:
    """Return the names in an engine's list of models.

    Raises ValueError, KeyError, TypeError or RecursionError if the text is no list of models.
    """
    cards = json.loads(text)["data"]
    # Ollama writes null for an empty list.
    return tuple(str(card["id"]) for card in (() if cards is None else cards))


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
