"""Tests of multipart forms: fields, limits, and refusal of ambiguous forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.errors import GatewayError
from gateway.protocol.request.multipart import (
    MAX_FIELD_BYTES,
    MAX_PARTS,
    edit_form,
    form_type,
    read_form,
)

FILE = 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'


def field(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


def form(*parts: tuple[str, bytes], boundary: str = "b-1") -> bytes:
    body = b"".join(
        f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts
    )
    return body + f"--{boundary}--\r\n".encode()


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=300))
def test_fields_are_read_and_any_file_has_a_stand_in_of_its_own(one: bytes, other: bytes) -> None:
    bodies = [form((field("model"), b"demo"), (FILE, data), (field("stream"), b"true"))
              for data in (one, other)]  # fmt: skip
    if any(data.find(b"\r\n--b-1") >= 0 for data in (one, other)):
        return
    first, second = map(read_form, bodies)
    assert (bytes(first["model"]), bytes(first["stream"])) == (b'"demo"', b"true")
    assert len(bytes(first["file"])) == 4098
    assert (bytes(first["file"]) == bytes(second["file"])) is (one == other)
    changed = edit_form(bodies[0], "other-name", frozenset(("stream",)))
    assert changed == form((field("model"), b"other-name"), (FILE, one))


def test_dropped_fields_leave_a_valid_form_wherever_they_stand() -> None:
    parts = [(field("rid"), b"1"), (field("model"), b"m"), (FILE, b"x"), (field("rid2"), b"2")]
    kept = edit_form(form(*parts), "n", frozenset(("rid", "rid2")))
    assert set(read_form(kept)) == {"model", "file"}
    assert json.loads(bytes(read_form(kept)["model"])) == "n"


def test_the_content_type_has_the_form_s_boundary() -> None:
    assert form_type(form((FILE, b"x"))) == b'multipart/form-data; boundary="b-1"'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"preamble\r\n" + form((FILE, b"x")),
        form((FILE, b"x"))[:-6],
        form((FILE, b"x")).replace(b"\r\n", b"\n"),
        form(('Content-Disposition: form-data; x="1"; name="model"', b"m")),
        form(('Content-Disposition: form-data; name="a"; filename="f"; name="model"', b"m")),
        form((field("a") + "\r\n" + field("model"), b"m")),
        form(("Content-Type: text/plain", b"m")),
        form((field("model"), b"a"), (field("model"), b"b")),
        form((FILE, b"a"), (FILE, b"b")),
        form((field("model"), b"\xff")),
        form((field("prompt"), b"x" * (MAX_FIELD_BYTES + 1))),
        form(*((field(f"f{index}"), b"x") for index in range(MAX_PARTS + 1))),
        form((field("x" * 9000), b"x")),
    ],
)
def test_what_is_no_unambiguous_form_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        read_form(body)
    assert refused.value.status == 400
