"""Functions of the dialects whose prefill engines identify themselves in their first response.

`read` is the dialect's own function: it returns the identity in a prefill response, or None if the
response promises no transfer.
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
    """Return the prefill engine's identity, learnt earlier or from `answer`; None if unknown."""
    if terms.identity is not None or answer is None:
        return terms.identity
    return read(answer)


def identify(read: ReadIdentity, body: bytes) -> tuple[PrefillIdentity, ...]:
    """Return the identity in a prefill response's body in a tuple, which is empty without one."""
    answer = parse_response(body)
    identity = None if isinstance(answer, UnusableResponse) else read(answer)
    return () if identity is None else (identity,)


def check(read: ReadIdentity, answer: PrefillResponse) -> UnusableResponse | None:
    """Return why a prefill response is unusable, or None if it is usable."""
    if read(answer) is None:
        return UnusableResponse("the prefill answer promises no transfer")
    return None
