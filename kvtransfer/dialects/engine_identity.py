"""Helpers for protocols in which a prefill response says where its engine can be reached.

The gateway reads this identity in an engine's first response, and needs it later for decode
requests. Each protocol has a function that finds the identity in a response; the parameter `read`
is this function. It returns None if the response offers no KV.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.dialects.dialect import (
    HandoffTerms,
    PrefillIdentity,
    PrefillResponse,
    UnusableResponse,
    parse_response,
)

ReadIdentity = Callable[[PrefillResponse], PrefillIdentity | None]


def find_identity(
    read: ReadIdentity, terms: HandoffTerms, answer: PrefillResponse | None
) -> PrefillIdentity | None:
    """Return how decode engines can reach a prefill engine; None if that is not known.

    Uses `terms.identity` if the gateway already knew it, otherwise what `read` finds in the
    response `answer`.
    """
    if terms.identity is not None or answer is None:
        return terms.identity
    return read(answer)


def identify(read: ReadIdentity, body: bytes) -> tuple[PrefillIdentity, ...]:
    """Return the identity in a prefill response as a tuple of one, or () if the response has none.

    read  function that finds the identity in a parsed response
    body  the response's JSON
    """
    answer = parse_response(body)
    identity = None if isinstance(answer, UnusableResponse) else read(answer)
    return () if identity is None else (identity,)


def check(read: ReadIdentity, answer: PrefillResponse) -> UnusableResponse | None:
    """Return why a prefill response offers no KV to a decode engine; None if it does."""
    if read(answer) is None:
        return UnusableResponse("the prefill response offers no KV")
    return None
