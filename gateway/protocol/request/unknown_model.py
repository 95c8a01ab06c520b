"""The error for a request that names an unknown model. It suggests similar names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress

from gateway.protocol.errors import Failure, GatewayError

MOST_SUGGESTIONS = 3
MOST_SHOWN = 64
"""Maximum number of characters of the client's name that the message repeats."""

MOST_COMPARED = 128
"""Maximum number of characters of it that are compared with other names."""


def unknown_model(
    requested: str, models: Iterable[str], unlisted: Mapping[str, str]
) -> GatewayError:
    """Return the error for a model name that has no route.

    requested  the name that the client used
    models     the names that the client may use
    unlisted   the error message for each configured model that is not among them
    """
    with suppress(KeyError):
        return GatewayError(Failure.MODEL_NOT_FOUND, unlisted[requested], param="model")
    if len(requested) <= MOST_SHOWN and requested.isprintable():
        shown = requested
    else:
        shown = requested[:MOST_SHOWN].encode("unicode_escape").decode() + "..."
    similar = difflib.get_close_matches(requested[:MOST_COMPARED], models, n=MOST_SUGGESTIONS)
    hint = f" Did you mean {' or '.join(repr(name) for name in similar)}?" if similar else ""
    message = f"The model '{shown}' does not exist.{hint}"
    return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
