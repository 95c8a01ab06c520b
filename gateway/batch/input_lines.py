"""Finds, reads and checks the lines of a batch's input file.

A line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. Blank lines do
not count.
"""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from io import BufferedReader

import msgspec

from gateway.batch.file_and_batch_objects import LineProblem
from gateway.protocol.api_table import API_PATHS, Api
from gateway.protocol.errors import GatewayError
from gateway.protocol.request.json_members import read_members

MAX_CUSTOM_ID_CHARS = 512
MAX_PROBLEMS = 20  # maximum number of problems that are reported for one file
LINE_OVERHEAD = 4096  # maximum bytes of a line outside its body
SLICE_BYTES = 256 * 1024  # bytes read per call in a thread, so that other threads run in between

BATCH_APIS: Mapping[str, Api] = {
    path: api for path, api in API_PATHS.items() if not api.is_form and api.is_admitted
}
"""The APIs whose requests a batch may contain, by path.

APIs with form bodies are left out, because a form does not fit a line of JSON.
"""


class InputLine(msgspec.Struct):
    """One line of a batch's input file, decoded; `body` is raw JSON."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


_decode = msgspec.json.Decoder(InputLine).decode
_decode_text = msgspec.json.Decoder(str).decode


def decode_line(raw: bytes) -> InputLine:
    return _decode(raw)


class InputLines:
    """Finds the lines of one batch input file, and reads one of them by its index.

    The calls with a file block; use them in a thread.
    """

    def __init__(self) -> None:
        self._spans = array("Q")  # offset and size of each line

    @property
    def count(self) -> int:
        """Return the number of lines that scan() has found so far."""
        return len(self._spans) // 2

    def scan(self, file: BufferedReader, max_line: int, see: Callable[[bytes], None]) -> bool:
        """Read the next part of the input file, and store at which offset each of its lines begins.

        Returns whether more lines may follow. A line longer than `max_line` bytes ends the file. A
        byte order mark before the first line, as Windows programs write, does not belong to the
        line.

        file  the input file; reading continues at its position
        see   function that is called with every line that is not blank
        """
        offset = start = file.tell()
        while offset - start < SLICE_BYTES:
            line = file.readline(max_line + 1)
            if not line:
                return False
            text = line if offset else line.removeprefix(BOM_UTF8)
            if text.strip():
                self._spans.extend((offset + len(line) - len(text), len(text)))
                see(text)
            if len(line) > max_line:
                return False
            offset += len(line)
        return True

    def span(self, number: int) -> tuple[int, int]:
        """Return where the line with index `number` is: its offset and size in bytes."""
        return self._spans[2 * number], self._spans[2 * number + 1]

    def read(self, file: BufferedReader, number: int) -> InputLine:
        """Read the line of a batch's input file that has the index `number`."""
        offset, size = self.span(number)
        file.seek(offset)
        return decode_line(file.read(size))


class InputChecker:
    """Checks the lines of one batch input file in order, and collects their problems.

    lines     number of requests so far
    model     the model of all requests; "" before the first one
    problems  the problems so far, at most MAX_PROBLEMS
    """

    def __init__(self, endpoint: str, max_lines: int, max_body: int) -> None:
        """Create a check of an input file.

        endpoint   the url that every line must have
        max_lines  maximum number of lines
        max_body   maximum bytes of a line's body
        """
        self._endpoint, self._max_lines, self._max_body = endpoint, max_lines, max_body
        self._ids: set[str] = set()
        self.lines = 0
        self.model = ""
        self.problems: list[LineProblem] = []

    @property
    def is_full(self) -> bool:
        """Return whether the check may stop, because it has found MAX_PROBLEMS problems."""
        return len(self.problems) >= MAX_PROBLEMS

    def check(self, raw: bytes) -> None:
        """Check the next line of the input file. The line must not be blank."""
        self.lines += 1
        if self.lines > self._max_lines:
            message = f"The file has more than {self._max_lines} requests."
            self.problems = [LineProblem("too_many_tasks", message)] * MAX_PROBLEMS
            return
        problem = self._problem(raw)
        if problem is not None:
            code, message, param = problem
            self.problems.append(LineProblem(code, message, self.lines, param))

    def finish(self) -> tuple[LineProblem, ...]:
        """Return the distinct problems of the whole input file. An empty file is a problem too."""
        if not self.lines:
            return (LineProblem("empty_file", "The input file contains no requests."),)
        return tuple(dict.fromkeys(self.problems))

    def _problem(self, raw: bytes) -> tuple[str, str, str | None] | None:
        # Return (code, message, member) of the first problem of a line, or None if it is valid.
        if len(raw) > self._max_body + LINE_OVERHEAD:  # the reader cuts off a longer line
            return self._too_large()
        try:
            line = _decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return "invalid_json_line", f"This line is not a valid request: {error}.", None
        custom_id = line.custom_id
        if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters."
            return "invalid_custom_id", message, "custom_id"
        if custom_id in self._ids:
            message = f"The custom_id '{custom_id[:64]}' is used more than once."
            return "duplicate_custom_id", message, "custom_id"
        self._ids.add(custom_id)
        if line.method != "POST":
            return "invalid_method", "The method must be POST.", "method"
        if line.url != self._endpoint:
            message = f"The url must be the batch's endpoint, {self._endpoint}."
            return "mismatched_endpoint", message, "url"
        return self._body_problem(bytes(line.body))

    def _too_large(self) -> tuple[str, str, str]:
        return "body_too_large", f"The body is larger than {self._max_body} bytes.", "body"

    def _body_problem(self, body: bytes) -> tuple[str, str, str | None] | None:
        if len(body) > self._max_body:
            return self._too_large()
        try:
            members = read_members(body)
        except GatewayError as error:
            return "invalid_body", error.message, "body"
        for name, what in (("stream", "be a stream"), ("background", "run in the background")):
            if bytes(members.get(name, msgspec.Raw(b"null"))) not in (b"null", b"false"):
                return "invalid_body", f"A request of a batch cannot {what}.", f"body.{name}"
        try:
            model = _decode_text(members.get("model", b"null"))
        except msgspec.DecodeError:
            return "missing_model", "The body's model must be a string.", "body.model"
        self.model = self.model or model
        if model != self.model:
            message = f"All requests of a batch must have the same model, {self.model[:64]!r}."
            return "mismatched_model", message, "body.model"
        return None
