"""The journal of one batch: the results so far, and received parts of interrupted answers. No I/O.

An entry is one line of JSON. A result counts only after its entry was appended and synced to disk.
After a crash, the last entry may be incomplete; the next owner cuts it off. A failed write, for
example on a full disk, leaves a damaged line in the middle, which is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class KeptAnswer(msgspec.Struct):
    """The part of an answer that was received before its batch request was interrupted.

    prompt         token ids of the prompt, as the engine rendered it
    tokens         ids of the tokens of `text`
    text           text of the answer so far
    first          first chunk of the answer as raw JSON, which contains its id and creation time
    prompt_tokens  number of tokens of the original prompt
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    first: msgspec.Raw
    prompt_tokens: int


class JournalEntry(msgspec.Struct, omit_defaults=True):
    """One event of a batch: a request got its result, or its attempt was interrupted.

    number   index of the request in the input file, from 0
    is_good  whether the result belongs in the output file; otherwise it belongs in the errors file
    result   the line of that file, without its line feed; "" after an interruption
    kept     the received part of an interrupted answer, which the next attempt continues. None: the
             next attempt starts again, and earlier parts are dropped
    """

    number: int
    is_good: bool = False
    result: str = ""
    kept: KeptAnswer | None = None


_decode = msgspec.json.Decoder(JournalEntry).decode
_encode = msgspec.json.Encoder().encode


def encode_entry(entry: JournalEntry) -> bytes:
    """Return one event of a batch as a line of the journal, with its line feed."""
    return _encode(entry) + b"\n"


class JournalReader:
    """Reads a journal line by line, and collects what a new owner needs to continue the batch.

    has_result  one byte for each request: 1 if its result is in the journal
    kept        received parts of interrupted answers, by the request's index
    size        number of bytes up to the end of the last complete line. An incomplete line after
                it, left by a crash, is cut off
    """

    def __init__(self, total: int) -> None:
        self.has_result = bytearray(total)
        self.kept: dict[int, KeptAnswer] = {}
        self.completed = self.failed = self.size = 0

    def feed(self, line: bytes) -> JournalEntry | None:
        """Read the next line of a journal; return its entry if it is the first result of a request.

        Returns None for all other lines, such as the damaged line of a failed write. A line without
        its line feed ends the journal.
        """
        if not line.endswith(b"\n"):
            return None
        self.size += len(line)
        try:
            entry = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not 0 <= entry.number < len(self.has_result):
            return None
        return entry if self._note(entry) else None

    def _note(self, entry: JournalEntry) -> bool:
        if not entry.result:
            if entry.kept is None:
                self.kept.pop(entry.number, None)
            elif not self.has_result[entry.number]:
                self.kept[entry.number] = entry.kept
            return False
        if self.has_result[entry.number]:  # two owners wrote a result: the first one counts
            return False
        self.has_result[entry.number] = 1
        self.kept.pop(entry.number, None)
        self.completed += entry.is_good
        self.failed += not entry.is_good
        return True

    def missing(self) -> Iterator[int]:
        """Yield the indexes of the requests that have no result yet, in order."""
        at = self.has_result.find(0)
        while at >= 0:
            yield at
            at = self.has_result.find(0, at + 1)
