"""Where the line meets prefixes: a call's fingerprint, and what each endpoint is believed to hold of it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.openai import Call
from policies.fingerprint import Fingerprint, Fingerprinter
from policies.prefix_index import PrefixIndex


class Prefixes:
    """The process's fingerprinter and index. Live: a reload forgets nothing."""

    __slots__ = ("_fingerprinter", "index")

    def __init__(self, secret: bytes, index_bytes: int, block_bytes: int) -> None:
        """`secret`: gateways that share it have the same keys for the same prompts."""
        self._fingerprinter = Fingerprinter(secret, block_bytes)
        self.index = PrefixIndex(index_bytes)

    def of(self, call: Call, model: str) -> Fingerprint:
        """The fingerprint of what the engine will render. Requests of other models, or with another cache salt, never
        share a key: they share no cached prompt either (faults.md A15)."""
        salt = b"%b\0%b" % (call.salt, model.encode())
        return self._fingerprinter.of(salt, *[memoryview(part) for part in call.prompt])

    def cached(self, fingerprint: Fingerprint, prompt_tokens: int) -> Sequence[int]:
        """Prompt tokens believed cached, by slot."""
        return self.index.match(fingerprint, prompt_tokens)
