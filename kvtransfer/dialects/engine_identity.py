"""Helpers for dialects whose prefill engines identify themselves in their first response.

Their parameter `read` is a function of the dialect. It returns the identity in a prefill response,
or None if the response offers no KV.
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
    """Return the prefill engine's identity, known earlier or from its response; None if unknown."""
    if terms.identity is not None or answer is None:
        return terms.identity
    return read(answer)


def identify(read: ReadIdentity, body: bytes) -> tuple[PrefillIdentity, ...]:
    """Return a tuple with the identity in a prefill response, or () if it has none."""
    answer = parse_response(body)
    identity = None if isinstance(answer, UnusableResponse) else read(answer)
    return () if identity is None else (identity,)


def check(read: ReadIdentity, answer: PrefillResponse) -> UnusableResponse | None:
    """Return why a prefill response is unusable, or None if it is usable."""
    if read(answer) is None:
        return UnusableResponse("the prefill answer promises no transfer")
    return None
