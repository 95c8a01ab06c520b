"""Reads recorded conversations of real clients from the files in tests/data/clients/.

A file has the requests of one conversation as the client sent them, without API keys, paths and
host names. Texts that belong to the client, such as its system prompt, are replaced by a
placeholder with their length and a name. When read, it becomes as many bytes of invented words.

Equal texts have equal names, so that prompts keep their common beginnings. Each request repeats
most of the previous one, so only the difference is stored. bench/clients/fixtures.py writes the
files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

FOLDER = Path(__file__).parent / "data" / "clients"
MARK = re.compile("⟦([0-9]+):([0-9a-z-]+)⟧")
_WORDS = (
    *("pump", "valve", "dam", "lake", "river", "gauge", "depth", "level", "flow", "spill", "gate"),
    *("weir", "canal", "tank", "pipe", "meter", "basin", "flood", "storm", "dry", "wet", "north"),
)


Difference = list[str | list[int]]
"""The body of a request, as its difference to the body of the request before.

It is a list of new texts, and of ranges [start, end] that are copied from that body.
"""


class RecordedRequest(NamedTuple):
    target: str
    headers: dict[str, str]
    body: str

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RecordedClient(NamedTuple):
    """A recorded conversation of one real client program, which tests send again.

    session  how the gateway identified the session, as in its access log
    """

    name: str
    client: str
    version: str
    session: str
    requests: list[RecordedRequest]


def filler(length: int, name: str) -> str:
    state, words, size = xxh3_64_intdigest(name.encode()), [], 0
    while size <= length:  # one more than the spaces between words
        word = _WORDS[state % len(_WORDS)]
        words.append(word)
        size += len(word) + 1
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64) ^ (state >> 33)
    return " ".join(words)[:length]


def expand(text: str) -> str:
    return MARK.sub(lambda match: filler(int(match[1]), match[2]), text)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> RecordedClient:
    page = json.loads((FOLDER / f"{name}.json").read_text())
    requests, headers = list[RecordedRequest](), dict[str, str]()
    for each, body in zip(page["requests"], _bodies(page["requests"]), strict=True):
        changed = headers | each["headers"]
        headers = {key: value for key, value in changed.items() if value is not None}
        requests.append(RecordedRequest(each["target"], headers, expand(body)))
    return RecordedClient(name, page["client"], page["version"], page["session"], requests)


def _bodies(requests: list[dict[str, Any]]) -> Iterator[str]:
    body = ""
    for each in requests:
        pieces: Difference = each["body"]
        body = "".join(
            piece if isinstance(piece, str) else body[piece[0] : piece[1]] for piece in pieces
        )
        yield body
