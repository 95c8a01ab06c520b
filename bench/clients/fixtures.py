"""Converts recordings of `make clients` to test files in tests/data/clients/.

    python -m bench.clients.run build/clients --turns 4 --sessions 1 --record FOLDER
    python -m bench.clients.fixtures FOLDER build/clients

API keys, paths, host names and times are removed. Texts that belong to a client, such as its system
prompt, are replaced by placeholders (see tests/recorded_clients.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from bench.clients.cache_share import READERS
from bench.clients.catalogue import CATALOGUE, ClientSpec
from bench.clients.run import recording_name, version_of
from mockgpu.mock_tokenizer import WORDS
from tests.recorded_clients import FOLDER, MARK, Difference, filler

MAX_KEPT = 40  # characters of a client's own text that stay as they are
MAX_FILE_BYTES = 100_000
_DROPPED_HEADERS = frozenset(
    ("host", "connection", "content-length", "accept-encoding", "x-codex-turn-metadata")
)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[^"]+')
_PARTS = re.compile(
    r"(This is message \d+ about site \d+\. .*? the filter and the log\?"
    r"|Please call the tool \w+ with \{.*?\} and report\."
    r"|The depth at pump \d+ is \d+ m\.|pump \d+ is \d+ m deep)"
)
_GENERATED = re.compile("(?:{})+".format("|".join(word.decode() for word in WORDS)))
_ID = re.compile(r"[^\s/]{1,400}")
_KEPT = ("You look after the pumps", "Measure the depth at a pump", "x-anthropic-billing-header")


def cleaned_literal(text: str, following: str) -> str:
    """Return the content of a JSON string, with the texts that belong to the client replaced.

    following  the JSON after the string; a ":" there means that the string is a member's name,
               which is not replaced
    """
    if following.lstrip().startswith(":") or (len(text) <= MAX_KEPT and "/" not in text):
        return text
    if _ID.fullmatch(text) or text.startswith(_KEPT) or _GENERATED.fullmatch(f" {text.strip()}"):
        return text
    pieces = _PARTS.split(text)
    return "".join(
        piece if number % 2 or len(piece) <= 2 else mark_of(piece)
        for number, piece in enumerate(pieces)
    )


def mark_of(text: str) -> str:
    """Return the placeholder for a text of a client program: its length in bytes and a hash.

    It replaces the text in a stored recording. A text that is shorter than its placeholder is
    replaced by other words of the same length.
    """
    length, name = len(text.encode()), xxh3_64_hexdigest(text.encode())[:6]
    mark = f"⟦{length}:{name}⟧"
    return mark if length > len(mark.encode()) else filler(length, name)


def cleaned_body(body: str) -> str:
    """Remove a client's own texts from a request body; keep structure and identifiers."""
    assert MARK.search(body) is None
    return _LITERAL.sub(
        lambda match: f'"{cleaned_literal(match[1], body[match.end() : match.end() + 2])}"', body
    )


def cleaned_headers(headers: list[list[str]]) -> dict[str, str]:
    """Return HTTP headers with a dummy API key, without those that every HTTP client sends."""
    kept = {name: value for name, value in headers if name.lower() not in _DROPPED_HEADERS}
    for name in kept:
        if name.lower() in ("authorization", "x-api-key"):
            kept[name] = "Bearer sk-any-key" if name.lower() == "authorization" else "sk-any-key"
    return kept


def difference(before: str, after: str) -> Difference:
    """Return the differences of a text from the text before it, which it mostly repeats.

    The result has the new parts of `after`, and the ranges [start, end] of `before` that are
    unchanged.
    """
    old, new = _TOKENS.findall(before), _TOKENS.findall(after)
    starts = [0, *accumulate(map(len, old))]
    pieces: Difference = []
    done = 0
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    for block in blocks:
        if own := "".join(new[done : block.b]):
            pieces.append(own)
        if block.size:
            pieces.append([starts[block.a], starts[block.a + block.size]])
        done = block.b + block.size
    return pieces


def fixture(spec: ClientSpec, version: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the test file for one recorded conversation of a client program."""
    requests: list[dict[str, Any]] = []
    before, known = "", dict[str, str]()
    for line in lines:
        target = line["line"].split(" ")[1]
        if target.partition("?")[0] not in READERS or line["status"] != 200:
            continue
        body = cleaned_body(line["body"])
        headers = cleaned_headers(line["headers"])
        changed = {
            name: headers.get(name)
            for name in known | headers
            if headers.get(name) != known.get(name)
        }
        requests.append(
            {
                "target": target,
                "headers": changed,
                "body": difference(before, body),
            }
        )
        before, known = body, headers
    about = {"client": spec.name, "version": version, "session": spec.session}
    return about | {"requests": requests}


def recordings(folder: Path) -> Iterator[tuple[ClientSpec, str, list[dict[str, Any]]]]:
    for spec in CATALOGUE:
        name = recording_name(spec)
        file = folder / f"{name}.jsonl"
        if file.exists():
            yield spec, name, [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for spec, name, lines in recordings(Path(sys.argv[1])):
        page = fixture(spec, version_of(spec, Path(sys.argv[2])), lines)
        text = json.dumps(page, ensure_ascii=False, indent=1) + "\n"
        assert len(text.encode()) < MAX_FILE_BYTES, f"{name} has {len(text):,} characters"
        (FOLDER / f"{name}.json").write_text(text)
        print(f"{name}: {len(page['requests'])} requests, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
