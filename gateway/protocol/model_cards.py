"""The responses of /v1/models, in OpenAI's or Anthropic's format, depending on the client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from gateway.protocol.errors import Failure, GatewayError

VERSION_HEADER = "anthropic-version"
DEFAULT_PAGE, MAX_PAGE = 20, 1000  # entries of a page in Anthropic's API

_LIMIT = re.compile(r"[0-9]{1,4}")


class ListedModel(Protocol):
    """A model in the list for clients; `context_tokens` is None if the limit is unknown."""

    @property
    def name(self) -> str: ...

    @property
    def context_tokens(self) -> int | None: ...


def wants_anthropic(headers: Mapping[str, str]) -> bool:
    """Return whether a client uses Anthropic's API: its SDKs send the header anthropic-version."""
    return VERSION_HEADER in headers


def openai_card(name: str, model: ListedModel, created: int) -> dict[str, object]:
    """Return the description of a model in OpenAI's format; `created` is in Unix seconds."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": model.name,
        "max_model_len": model.context_tokens,
    }


def openai_list(models: Mapping[str, ListedModel], created: int) -> dict[str, object]:
    """Return the body of /v1/models in OpenAI's format: the list of all models."""
    cards = [openai_card(name, models[name], created) for name in sorted(models)]
    return {"object": "list", "data": cards}


def anthropic_card(name: str, model: ListedModel, created: int) -> dict[str, object]:
    """Return the description of a model in Anthropic's format; `created` is in Unix seconds."""
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    card: dict[str, object] = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": moment,
    }
    if model.context_tokens is not None:
        card["max_input_tokens"] = model.context_tokens
    return card


def anthropic_list(
    models: Mapping[str, ListedModel], created: int, query: Mapping[str, str]
) -> dict[str, object]:
    """Return one page of the list of models in Anthropic's format, as `query` selects it.

    Raises GatewayError (400) for an invalid limit or an unknown cursor.
    """
    names = sorted(models)
    page, has_more = _page(names, query)
    return {
        "data": [anthropic_card(name, models[name], created) for name in page],
        "has_more": has_more,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _page(names: Sequence[str], query: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    # Return the model names on a page, and whether more names follow in its direction.
    limit = _limit(query.get("limit"))
    if "before_id" in query:
        before = names[: _position(names, query["before_id"], "before_id")]
        return before[-limit:], len(before) > limit
    begin = _position(names, query["after_id"], "after_id") + 1 if "after_id" in query else 0
    return names[begin : begin + limit], len(names) > begin + limit


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_PAGE
    if not _LIMIT.fullmatch(text) or not 1 <= int(text) <= MAX_PAGE:
        message = f"'limit' must be a whole number from 1 to {MAX_PAGE}."
        raise GatewayError(Failure.BAD_REQUEST, message, param="limit")
    return int(text)


def _position(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise GatewayError(
            Failure.BAD_REQUEST, f"'{param}' must be the id of a listed model.", param=param
        )
    return names.index(name)
