"""Writes the input file of a message batch from the body that creates the batch. No I/O."""

from __future__ import annotations

import msgspec

from gateway.batch.input_lines import SLICE_BYTES, InputChecker
from gateway.batch.json_list import JsonList, JsonListError
from gateway.protocol.api_table import MESSAGES
from gateway.protocol.errors import Failure, GatewayError


class _Item(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


_decode_item = msgspec.json.Decoder(_Item).decode
_encode = msgspec.json.Encoder().encode


class MessageLines:
    """Checks the requests of a message batch, and converts each to a line of an input file.

    The body is decoded request by request, and never as a whole.

    count  number of requests so far
    """

    def __init__(self, raw: bytes | bytearray, max_lines: int, max_body: int) -> None:
        """Prepare to convert the body of one request that creates a message batch.

        raw        body of the request that creates the batch
        max_lines  maximum number of requests
        max_body   maximum bytes of one request
        """
        self._items = JsonList(raw, "requests").items()
        self._checker = InputChecker(MESSAGES.path, max_lines, max_body)
        self.count = 0

    def next(self) -> bytes:
        """Return the next lines, about SLICE_BYTES of them; b"" at the end of the body.

        Raises GatewayError (400) with the first request that is invalid.
        """
        lines, size = list[bytes](), 0
        try:
            for item in self._items:
                lines.append(self._line(item))
                size += len(lines[-1])
                if size >= SLICE_BYTES:
                    break
        except JsonListError as error:
            message = f"The body is not a valid request to create a batch: {error}."
            raise _bad(message, None) from None
        if not self.count:
            raise _bad("The batch has no requests; send at least one.", "requests")
        return b"".join(lines)

    def _line(self, text: bytes) -> bytes:
        # Return the line for one request of the body.
        path = f"requests[{self.count}]"
        try:
            item = _decode_item(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise _bad(f"{path} is not a valid request of a batch: {error}.", path) from None
        # Line breaks between the tokens of JSON become spaces; strings cannot contain any.
        params = bytes(item.params).replace(b"\n", b" ").replace(b"\r", b" ")
        members = {"custom_id": item.custom_id, "method": "POST", "url": MESSAGES.path}
        line = _encode(members | {"body": msgspec.Raw(params)}) + b"\n"
        self._checker.check(line)
        if self._checker.problems:
            problem = self._checker.problems[0]
            param = (problem.param or "params").replace("body", "params", 1)
            raise _bad(f"{path}: {problem.message}", f"{path}.{param}")
        self.count += 1
        return line


def _bad(message: str, param: str | None) -> GatewayError:
    return GatewayError(Failure.BAD_REQUEST, message, param=param)
