"""The generation log of mock engines: for each sequence, how many tokens were really generated.

A client sees only the tokens that reach it. An engine also generates tokens of a request that was
interrupted, until it notices. The log counts them. `GroupSpec.generation_log` names its file.
"""

from __future__ import annotations

from time import monotonic

import msgspec

from mockgpu.mock_tokenizer import token_ids

_encode = msgspec.json.Encoder().encode


class GeneratedSequence(msgspec.Struct):
    """One line of the log: a sequence that ended, or was aborted or failed.

    prompt     token ids of the prompt
    generated  number of generated tokens
    began_s    monotonic time at which the engine received the request, in seconds
    ended_s    monotonic time of its end
    """

    prompt: list[int]
    generated: int
    began_s: float
    ended_s: float


class GenerationLog:
    """Appends a line of JSON to a file for each sequence. Several engines may use one file."""

    def __init__(self, path: str) -> None:
        """Open the file, and create it if it is missing. Raises OSError if that fails."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the engine

    def write(self, prompt: bytes, generated: int, began_s: float) -> None:
        """Append the line of a sequence that ends now; `prompt` has four bytes per token."""
        line = GeneratedSequence(token_ids(prompt), generated, began_s, monotonic())
        self._file.write(_encode(line) + b"\n")
