"""The gateway's view of the engines' prefix caches: prompt fingerprints and the prefix index."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.protocol.openai import Call
from gateway.protocol.sessions import session_key
from policies.model import INFERRED_SESSION
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.growing_prefix import GrowingPrefixes
from policies.prefix.prefix_index import PrefixIndex
from policies.prefix.prefix_match import PrefixMatch


class PrefixCacheView:
    """The prompt fingerprinter and the prefix index of this process; both survive a reload."""

    __slots__ = ("_conversations", "_fingerprinter", "index")

    def __init__(self, secret: bytes, index_bytes: int, block_bytes: int) -> None:
        """Initialize; gateways with the same `secret` compute the same keys for a prompt."""
        self._fingerprinter = Fingerprinter(secret, block_bytes)
        self.index = PrefixIndex(index_bytes)
        self._conversations = GrowingPrefixes()

    def fingerprint(self, call: Call, model: str) -> Fingerprint:
        """Return the fingerprint of the prompt as the engine will render it.

        Requests for different models, or with different cache salts, never share a key, because
        engines share no cached prompt between them either.
        """
        salt = b"%b\0%b" % (call.salt, model.encode())
        return self._fingerprinter.fingerprint(salt, *[memoryview(part) for part in call.prompt])

    def recognise_session(self, call: Call, fingerprint: Fingerprint) -> None:
        """Assign a call that names no session to the session whose prompt it continues, if any."""
        request, prompt = call.request, call.prompt
        if request.session or not prompt:
            return
        preamble_bytes = sum(map(len, prompt[:-1]))
        name = self._conversations.recognise(
            request.tenant, fingerprint, preamble_bytes, memoryview(prompt[-1])
        )
        if name:
            call.request = msgspec.structs.replace(
                request,
                session=session_key(request.tenant, f"{INFERRED_SESSION}:{name}"),
                session_source=INFERRED_SESSION,
            )

    def cached_tokens(self, fingerprint: Fingerprint, prompt_tokens: int) -> Sequence[int]:
        """Return the number of prompt tokens believed to be cached at each endpoint, by slot."""
        return self.index.match(fingerprint, prompt_tokens)

    def holders(self, fingerprint: Fingerprint, prompt_tokens: int) -> PrefixMatch:
        """Return the endpoints that are believed to have part of the prompt cached.

        The result equals that of cached_tokens(), but has no item for the other endpoints.
        """
        return self.index.match_holders(fingerprint, prompt_tokens)
