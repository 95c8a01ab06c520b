"""Reads the numbers of a request body that have limits, and checks the sizes of its lists. No I/O.

Engines use memory and time in proportion to these values, so clients must not choose them freely.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.protocol.request.json_members import bad_request, member_value
from gateway.protocol.request.lax_numbers import lax_integer

MAX_NUMBERS = {
    "n": 128,
    "best_of": 128,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 2**24),
}
MAX_MEMBER_BYTES = {
    "stop": 16 * 1024,
    "stop_token_ids": 16 * 1024,
    "bad_words": 64 * 1024,
    "logit_bias": 256 * 1024,
}
_GUARDED = frozenset((*MAX_NUMBERS, *MAX_MEMBER_BYTES))


class LaxNumberError(Exception):
    """Raised for an integer in a form that is not JSON's but that vLLM accepts, such as "3"."""


def read_numbers(members: Mapping[str, msgspec.Raw]) -> dict[str, int]:
    """Return the integers of the request that have limits, by the member's name.

    Raises GatewayError for a value that is invalid or could harm an engine. Raises LaxNumberError
    for an integer in another form, such as 3.0 or "3".
    """
    numbers: dict[str, int] = {}
    for name in _GUARDED.intersection(members):
        if name in MAX_MEMBER_BYTES:
            if len(members[name]) > MAX_MEMBER_BYTES[name]:
                raise bad_request(
                    f"The value of '{name}' is longer than {MAX_MEMBER_BYTES[name]} bytes.",
                    name,
                )
        elif (value := member_value(members, name)) is not None:
            is_valid = type(value) is int and 1 <= value <= MAX_NUMBERS[name]
            numbers[name] = value if is_valid else _bounded(name, value, members)
    return numbers


def _bounded(name: str, value: object, members: Mapping[str, msgspec.Raw]) -> int:
    # Return `value` as a limited integer; raise GatewayError if it is invalid.
    #
    # A completion may generate 0 tokens, to have its prompt scored. This returns 1 then, the least
    # that a request may count. Raises LaxNumberError for an integer that is not a JSON integer.
    if type(value) is not int:
        if lax_integer(value) is None:
            raise bad_request(f"'{name}' must be an integer.", name)
        raise LaxNumberError(name)
    if value == 0 and name == "max_tokens" and bytes(members.get("echo", b"")) == b"true":
        return 1
    if not 1 <= value <= MAX_NUMBERS[name]:
        raise bad_request(f"'{name}' must be between 1 and {MAX_NUMBERS[name]}, not {value}.", name)
    return value
