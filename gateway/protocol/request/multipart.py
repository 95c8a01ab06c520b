"""Reads and edits forms (multipart/form-data), in which the audio APIs receive a file. No I/O.

The boundary is taken from the first line of the body, because clients send nothing before it. A
form is read in place, and edited by joining parts of it, so that a file is copied at most once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import NamedTuple

import msgspec
import xxhash

from gateway.protocol.errors import GatewayError
from gateway.protocol.request.json_members import bad_request
from gateway.protocol.request.media import MIN_MEDIUM_BYTES

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 * 1024
MAX_PART_HEAD = 8 * 1024
_BOUNDARY = re.compile(rb"--([0-9A-Za-z'()+_,./:=?-]{1,70})\r\n")
# Stricter than HTTP: a line that gateway and engine could read differently is refused.
_DISPOSITION = re.compile(
    rb'content-disposition: ?form-data; ?name="([^"\\\r\n]{1,256})"'
    rb"(; ?filename=\"[^\"\r\n]*\")?(; ?filename\*=[A-Za-z0-9'%._~-]+)?",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"[0-9]{1,9}")
_SINGLE = frozenset(("model", "file", "stream"))
_HEX_CHARS = 32


class FormPart(NamedTuple):
    """One part of a multipart form: its name, and the offsets of its beginning and its content."""

    name: str
    start: int
    content: int
    end: int
    is_file: bool


def read_form(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a form as raw JSON, with a placeholder string for each file.

    A placeholder has the length from which the file's tokens are estimated, and is derived from the
    file's content. Raises GatewayError (400) if the body is not a form, exceeds a limit, or has a
    field twice that affects routing.
    """
    members: dict[str, msgspec.Raw] = {}
    for part in _parts(body):
        if part.name in members and part.name in _SINGLE:
            raise bad_request(
                f"The form contains the field '{part.name}' twice; send it once.", part.name
            )
        content = memoryview(body)[part.content : part.end]
        members[part.name] = msgspec.Raw(
            _stand_in(content) if part.is_file else _json(part.name, bytes(content))
        )
    return members


def edit_form(body: bytes, model: str, drop: Set[str] = frozenset()) -> bytes:
    """Return a copy of a form with another model name, and without the fields in `drop`."""
    pieces: list[bytes | memoryview] = []
    view, begin = memoryview(body), 0
    delimiter_line = len(b"--") + _boundary_length(body) + len(b"\r\n")
    for part in _parts(body):
        if part.name in drop:
            pieces.append(view[begin : part.start - delimiter_line])
            begin = part.end + len(b"\r\n")
        elif part.name == "model":
            pieces += (view[begin : part.content], model.encode())
            begin = part.end
    return b"".join((*pieces, view[begin:]))


def form_type(body: bytes) -> bytes:
    """Return the Content-Type header for a form with this body. It names the form's boundary."""
    return b'multipart/form-data; boundary="%b"' % body[2 : 2 + _boundary_length(body)]


def _boundary_length(body: bytes) -> int:
    match = _BOUNDARY.match(body)
    if match is None:
        raise _malformed()
    return len(match[1])


def _parts(body: bytes) -> Iterator[FormPart]:
    # Yield the parts of a form in order. Raises GatewayError (400) if it is malformed.
    first = _BOUNDARY.match(body)
    if first is None:
        raise _malformed()
    delimiter, start = b"\r\n--" + first[1], first.end()
    for _ in range(MAX_PARTS):
        head_end = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD)
        end = -1 if head_end < 0 else body.find(delimiter, head_end + 2)
        if end < 0:
            raise _malformed()
        name, is_file = _read_head(body[start:head_end])
        yield FormPart(name, start, min(head_end + 4, end), end, is_file)
        start = end + len(delimiter) + 2
        if body[start - 2 : start] == b"--":
            return
        if body[start - 2 : start] != b"\r\n":
            raise _malformed()
    raise bad_request(f"The form has too many parts; at most {MAX_PARTS} are accepted.")


def _read_head(head: bytes) -> tuple[str, bool]:
    # Return the name of a form part and whether it is a file, from its header lines.
    #
    # Raises GatewayError (400) if the lines are malformed.
    lines = [
        line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition")
    ]
    match = _DISPOSITION.fullmatch(lines[0]) if len(lines) == 1 else None
    if match is None:
        raise _malformed()
    return match[1].decode("utf-8", "replace"), bool(match[2] or match[3])


def _json(name: str, content: bytes) -> bytes:
    # Return the text of a form field as JSON: a boolean, an integer, or else a string.
    if len(content) > MAX_FIELD_BYTES:
        raise bad_request(
            f"The form field '{name}' is too long; at most {MAX_FIELD_BYTES} bytes are accepted.",
            name,
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise bad_request(f"The form field '{name}' is not valid UTF-8.", name) from None
    if text.lower() in ("true", "false"):
        return text.lower().encode()
    if _INTEGER.fullmatch(text) and name != "model":
        return msgspec.json.encode(int(text))
    return msgspec.json.encode(text)


def _stand_in(content: memoryview) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(content).encode()
    return b'"%b"' % (digest * (MIN_MEDIUM_BYTES // _HEX_CHARS))


def _malformed() -> GatewayError:
    return bad_request("The body must be a form (multipart/form-data) with CRLF line ends.")
