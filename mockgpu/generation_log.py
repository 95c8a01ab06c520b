"""Logs the number of tokens that a mock engine really generated for each sequence, for tests.

A client sees only the tokens that reach it. After an interruption, an engine generates further
tokens until it notices. `GroupSpec.generation_log` names the file.
"""

from __future__ import annotations

from time import monotonic

import msgspec

from mockgpu.mock_tokenizer import token_ids

_encode = msgspec.json.Encoder().encode


class GeneratedSequence(msgspec.Struct):
    """One line of the log of generated tokens: a sequence that ended, was aborted, or failed.

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
    """Writes a line of JSON per generated sequence, with the number of its tokens.

    Several engines may use one file.
    """

    def __init__(self, path: str) -> None:
        """Open the file, and create it if it is missing. Raises OSError if that fails."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the engine

    def write(self, prompt: bytes, generated: int, began_s: float) -> None:
        """Append a line for a sequence that ends now.

        prompt     tokens of the prompt, four bytes each
        generated  number of generated tokens
        began_s    monotonic time at which the engine received the request, in seconds
        """
        line = GeneratedSequence(token_ids(prompt), generated, began_s, monotonic())
        self._file.write(_encode(line) + b"\n")
