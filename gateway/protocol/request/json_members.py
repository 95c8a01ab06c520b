"""Decodes the members of a JSON object, but not their values, which stay raw JSON.

It rejects bodies that the gateway and an engine could read differently, and bodies that take too
long to decode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.json_object import find_members

LONG_BODY_BYTES = 2048
"""Length of a body from which on find_members() takes less time than msgspec, for usual text."""
# A body up to this size cannot hold enough members to need a limit while decoding.
SMALL_BODY_BYTES = 256 * 1024
MAX_MEMBERS = 256
MAX_NAME_CHARS = 256
MAX_DIGITS = 4096  # many JSON parsers reject longer numbers or are slow (CPython: 4300 digits)
_NOT_A_NUMBER = frozenset(b'{["')  # first bytes of values that are not numbers
_COMPOUND = frozenset(b"{[")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*([,}])")


class TooManyMembersError(Exception):
    """Raised when a JSON object has more than MAX_MEMBERS members."""


def read_members(body: bytes) -> dict[str, msgspec.Raw]:
    """Decode a JSON request body into its members: raw JSON values by name.

    Raises GatewayError (400) with a message that says what is wrong with the body.
    """
    members = decode_members(body)
    reject_ambiguous(body, members)
    return members


def decode_members(body: bytes) -> dict[str, msgspec.Raw]:
    """Decode a request body like read_members(), but leave checks to reject_ambiguous().

    Raises GatewayError (400) if the body is not a JSON object, or if it is large and has duplicate
    members.
    """
    found = find_members(body, msgspec.Raw) if len(body) >= LONG_BODY_BYTES else None
    if found is None:
        return _decode_any_form(body)
    members, is_ascii = found
    if not is_ascii:
        _check_encoding(body)
    return members


def _decode_any_form(body: bytes) -> dict[str, msgspec.Raw]:
    # Decode the members of a body, however the JSON is written.
    try:
        members = (
            _decode(body) if len(body) <= SMALL_BODY_BYTES else _decode_large(body, is_unique=True)
        )
    except RecursionError:
        raise GatewayError(
            Failure.BAD_REQUEST, "The JSON body of the request is nested too deeply."
        ) from None
    except TooManyMembersError:
        raise _too_many_members() from None
    except msgspec.ValidationError:
        raise bad_request("The body of the request must be a JSON object.") from None
    except UnicodeDecodeError:  # in the name of a member
        _check_encoding(body)
        raise
    except msgspec.DecodeError as error:
        raise bad_request(f"The body of the request is not valid JSON: {error}.") from None
    if not body.isascii():
        _check_encoding(body)
    if len(members) > MAX_MEMBERS:
        raise _too_many_members()
    return members


def _check_encoding(body: bytes) -> None:
    # Raise GatewayError if a body is not UTF-8. The decoders do not validate the encoding of raw
    # values, and engines would fail on it.
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise bad_request(
            f"The body of the request is not valid UTF-8 (byte {error.start})."
        ) from None


def decode_object(text: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Decode the JSON text of an object into its members: raw JSON values by name.

    Raises TooManyMembersError for a large object with too many members, and msgspec's own errors
    for invalid JSON.
    """
    return _decode(text) if len(text) <= SMALL_BODY_BYTES else _decode_large(bytes(text))


class _Name(str):
    """The name of a JSON member, as a type of its own so that msgspec calls a hook per name."""

    __slots__ = ()


def _decode_large(body: bytes, *, is_unique: bool = False) -> dict[str, msgspec.Raw]:
    # Decode like _decode, but raise TooManyMembersError after MAX_MEMBERS members. If the members
    # must be unique, raise GatewayError for a duplicate.
    remaining, seen = MAX_MEMBERS, set[str]()

    def count(_: type, name: str) -> _Name:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise TooManyMembersError
        if is_unique and name in seen:
            raise _duplicate(name)
        seen.add(name)
        return _Name(name)

    members = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=count)
    return {str(name): value for name, value in members.items()}


def _duplicate(name: str) -> GatewayError:
    return bad_request(f"The JSON body has the member '{name}' twice; send it once.", name)


def _too_many_members() -> GatewayError:
    return bad_request(f"The JSON body has more than {MAX_MEMBERS} members.")


def bad_request(message: str, param: str | None = None) -> GatewayError:
    """Return the error (400) for an invalid request; `param` names the invalid body member."""
    return GatewayError(Failure.BAD_REQUEST, message, param=param)


def missing_member(name: str) -> GatewayError:
    """Return the error (400) for a required body member that is missing."""
    return bad_request(f"Missing required parameter: '{name}'.", name)


def reject_ambiguous(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """Raise GatewayError for duplicate members, and for numbers with very many digits.

    The gateway and an engine might read duplicates differently.
    """
    # SDKs send compact JSON. If the members, written compactly, are as long as the body, there are
    # no duplicates. Only other bodies are searched, and only small ones: the search copies the
    # conversation, and decode_members() has found the duplicates of large bodies already.
    if len(body) > MAX_DIGITS and members:
        # Nearly always the conversation; then no other value is long.
        longest = max(members.values(), key=len)
        is_compound = memoryview(longest)[0] in _NOT_A_NUMBER
        if not is_compound or len(body) - len(longest) > MAX_DIGITS:
            _reject_long_numbers(members)
    compact = 1 + 4 * len(members) + sum(map(len, members)) + sum(map(len, members.values()))
    if compact != len(body):
        # The search for duplicates takes memory in proportion to the length of a name.
        if max(map(len, members), default=0) > MAX_NAME_CHARS:
            raise bad_request(
                f"The JSON body has a member whose name is longer than {MAX_NAME_CHARS} characters."
            )
        if len(body) <= SMALL_BODY_BYTES:
            _reject_duplicates(body, members)


def _reject_long_numbers(members: Mapping[str, msgspec.Raw]) -> None:
    for name, value in members.items():
        if len(value) > MAX_DIGITS and memoryview(value)[0] not in _NOT_A_NUMBER:
            raise bad_request(f"The number in '{name[:64]}' has too many digits.", name[:64])


def _reject_duplicates(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    # Raise GatewayError for a duplicate member: compare each member with the decoder's result.
    #
    # The decoder keeps the last of equal names, so an earlier one has another value or is seen
    # twice.
    offset = body.index(b"{") + 1
    seen: set[str] = set()
    while (key := _KEY.match(body, offset)) is not None:
        name = str(_decode_any(key[1]))
        value = bytes(members[name])
        if name in seen or not body.startswith(value, key.end()):
            raise _duplicate(name)
        seen.add(name)
        following = _NEXT.match(body, key.end() + len(value))
        # None: the decoded value is a prefix of an earlier, longer one of the same name.
        if following is None:
            raise _duplicate(name)
        offset = following.end()


def string_member(members: Mapping[str, msgspec.Raw], name: str) -> str:
    """Return the value of a required body member that must be a string.

    Raises GatewayError if it is missing or not a string.
    """
    if name not in members:
        raise missing_member(name)
    value = member_value(members, name)
    if not isinstance(value, str):
        raise bad_request(f"'{name}' must be a string.", name)
    return value


def member_value(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    """Decode a body member that is a string, a number, true, false or null; return () for others.

    Lists and objects may be large, so they are not decoded. Raises GatewayError for a number that
    cannot be represented.
    """
    raw = members[name]
    if memoryview(raw)[0] in _COMPOUND:
        return ()
    try:
        return _decode_any(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"The value of '{name}' is not valid: {error}.", name) from None


def join_members(members: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the JSON text of an object with these members, whose values are raw JSON."""
    pairs = (json.dumps(name).encode() + b":" + bytes(value) for name, value in members.items())
    return b"{" + b",".join(pairs) + b"}"
