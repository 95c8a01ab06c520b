"""The gateway's view of the engines' prefix caches: which prompts are cached at which endpoint."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.config import Config
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.kv_events.tokenization import UnreadPrompt, can_tokenize
from gateway.protocol.request.request_body import Call
from gateway.protocol.request.sessions import session_key
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.growing_prefix import GrowingPrefixes
from policies.prefix.prefix_index import PrefixIndex
from policies.prefix.prefix_match import PrefixMatch
from policies.routing_types import INFERRED_SESSION


class PrefixCacheView:
    """The hashing of prompts and the prefix index of this process; a reload keeps both.

    exact  the index from KV events, which corrects the prefix index; empty if no endpoint publishes
           events
    """

    __slots__ = ("_conversations", "_fingerprinter", "exact", "index")

    def __init__(
        self, secret: bytes, index_bytes: int, block_bytes: int, event_bytes: int = 1 << 26
    ) -> None:
        """Create an empty view of the engines' prefix caches.

        secret       key of the hashes; gateways with the same secret compute the same hashes
        index_bytes  bytes of memory for the prefix index
        block_bytes  bytes of a prompt per hashed block
        event_bytes  bytes of memory for the index from KV events
        """
        self.exact = ExactPrefixes(event_bytes)
        self._fingerprinter = Fingerprinter(secret, block_bytes)
        self.index = PrefixIndex(index_bytes)
        self._conversations = GrowingPrefixes()

    def fingerprint(self, call: Call, model: str) -> Fingerprint:
        """Return the fingerprint (chain of block hashes) of the prompt that the engine will see.

        Requests for different models, or with different cache salts, never share a hash, because
        engines share no cached prompts between them.
        """
        salt, prompt = b"%b\0%b" % (call.salt, model.encode()), call.prompt
        if len(prompt) == 1:
            fingerprint = self._fingerprinter.fingerprint(salt, memoryview(prompt[0]))
        else:
            parts = [memoryview(part) for part in prompt]
            fingerprint = self._fingerprinter.fingerprint(salt, *parts)
        if self.exact.endpoints and not self.exact.prompts.has(fingerprint):
            self._note_unread(call, model, fingerprint)
        return fingerprint

    def _note_unread(self, call: Call, model: str, fingerprint: Fingerprint) -> None:
        # Queue the prompt for learning its tokens, if an engine can report them.
        path, is_single = call.api.path, call.request.prompts == 1
        if is_single and not call.media_size.parts and can_tokenize(path, call.members):
            salt = call.salt if call.api.takes_salt else b""
            self.exact.note(UnreadPrompt(model, path, call.members, salt, fingerprint))

    def recognise_session(self, call: Call, fingerprint: Fingerprint) -> None:
        """Find the session of a request that does not name one.

        It is the session whose last prompt the request's prompt continues, if there is one.
        """
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
        """Return how many of the prompt's tokens each endpoint has cached, by slot number.

        The numbers are exact for endpoints with reliable KV events. For all others, the prefix
        index predicts them.
        """
        tokens = self.index.match(fingerprint, prompt_tokens)
        if self.exact.endpoints:
            return self.exact.correct(tokens, fingerprint, prompt_tokens)
        return tokens

    def holders(self, fingerprint: Fingerprint, prompt_tokens: int) -> PrefixMatch:
        """Return the endpoints that have part of the prompt cached, with the number of tokens.

        The numbers are those of cached_tokens(); endpoints with 0 are left out.
        """
        match = self.index.match_holders(fingerprint, prompt_tokens)
        if self.exact.endpoints:
            return self.exact.correct_match(match, fingerprint, prompt_tokens)
        return match


def create_prefix_caches(config: Config, secret: bytes) -> PrefixCacheView:
    """Create the view of the engines' prefix caches, with the configured amounts of memory."""
    prefix = config.prefix
    return PrefixCacheView(secret, prefix.index, prefix.block_bytes, prefix.events)
