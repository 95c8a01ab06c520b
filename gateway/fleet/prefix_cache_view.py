"""What the gateway believes to be in engines' prefix caches; hashes prompts, learns from answers.

It learns from the prompts that are sent, from the cached tokens that answers report, and from
other gateways. policies/prefix/prefix_index.py has the index. kv_events/exact_prefixes.py has what
engines report as KV events, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import msgspec

from gateway.config import Config
from gateway.fleet.kv_events.event_verification import CacheExpectation
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.kv_events.tokenization import UnreadPrompt, can_tokenize
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.sessions import session_key
from gateway.protocol.response.usage_and_error_search import TokenUsage
from policies.endpoint_load import EndpointLoad
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.growing_prefix import GrowingPrefixes
from policies.prefix.prefix_index import PrefixIndex
from policies.prefix.prefix_match import PrefixMatch
from policies.prefix.sampled_keys import Keys
from policies.routing_types import INFERRED_SESSION

_MAX_SALTS = 1024
"""Number of combined salts that are kept. When it is reached, all are forgotten, so the models and
salts that clients send cannot fill the memory."""


class PrefixCacheView:
    """Knows or predicts which prompts each engine has cached, so that requests can be sent there.

    There is one object per process, which a reload keeps.

    exact    the index from KV events, which corrects the prefix index; empty if no endpoint
             publishes events
    index    the prefix index, which predicts what is cached from the prompts that were sent
    updates  what other gateways must learn; None if this is the only one
    """

    __slots__ = ("_conversations", "_fingerprinter", "_salts", "exact", "index", "updates")

    def __init__(
        self, secret: bytes, index_bytes: int, block_bytes: int, event_bytes: int = 1 << 26
    ) -> None:
        """Create an empty view of the engines' prefix caches.

        secret       key of the hashes; gateways with the same secret compute the same hashes
        index_bytes  bytes of memory for the prefix index
        block_bytes  bytes of a prompt per hashed block
        event_bytes  bytes of memory for the index that is built from KV events
        """
        self.exact = ExactPrefixes(event_bytes)
        self._salts: dict[tuple[bytes, str], bytes] = {}
        self._fingerprinter = Fingerprinter(secret, block_bytes)
        self.index = PrefixIndex(index_bytes)
        self.updates: OutgoingUpdates | None = None
        self._conversations = GrowingPrefixes()

    def fingerprint(self, call: Call, model: str) -> Fingerprint:
        """Return the fingerprint (chain of block hashes) of the prompt that the engine will see.

        Requests for different models, or with different cache salts, never share a hash, because
        engines share no cached prompts between them.
        """
        salt = self._salts.get((call.salt, model)) or self._add_salt(call.salt, model)
        prompt = call.prompt
        if len(prompt) == 1:
            fingerprint = self._fingerprinter.fingerprint(salt, memoryview(prompt[0]))
        else:
            parts = [memoryview(part) for part in prompt]
            fingerprint = self._fingerprinter.fingerprint(salt, *parts)
        if self.exact.endpoints and not self.exact.prompts.has(fingerprint):
            self._note_unread(call, model, fingerprint)
        return fingerprint

    def _add_salt(self, salt: bytes, model: str) -> bytes:
        # Return what salts the prompts for a model; a tenant or its requests may have a cache salt.
        if len(self._salts) >= _MAX_SALTS:
            self._salts.clear()
        added = self._salts[salt, model] = b"%b\0%b" % (salt, model.encode())
        return added

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
        if request.session or not prompt or not fingerprint.keys:
            return  # a prompt shorter than a block continues none
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
        """Return how many of the prompt's tokens each endpoint has cached, by its slot number.

        `fingerprint` is the chain of hashes of the prompt's blocks. The numbers are exact for
        endpoints with reliable KV events. For all others, the prefix index predicts them.
        """
        tokens = self.index.match(fingerprint, prompt_tokens)
        if self.exact.endpoints:
            return self.exact.correct(tokens, fingerprint, prompt_tokens)
        return tokens

    def holders(self, fingerprint: Fingerprint, prompt_tokens: int) -> PrefixMatch:
        """Return the endpoints that have part of the prompt cached, and how many tokens of it.

        The numbers are those of cached_tokens(); endpoints with 0 are left out.
        """
        match = self.index.match_holders(fingerprint, prompt_tokens)
        if self.exact.endpoints:
            return self.exact.correct_match(match, fingerprint, prompt_tokens)
        return match

    # Learning

    def learn_sent(self, fingerprint: Fingerprint, live: LiveEndpoint, prompt_tokens: int) -> None:
        """Record, also for other gateways, that a prompt is sent to the endpoint and cached there.

        `fingerprint` is the chain of hashes of the prompt's blocks.
        """
        self.learn_prompt(fingerprint, live.load, prompt_tokens)
        if self.updates is not None:
            self.updates.prompts.append((fingerprint, live.endpoint, prompt_tokens, None))

    def learn_prompt(
        self, fingerprint: Fingerprint, load: EndpointLoad, prompt_tokens: int
    ) -> None:
        """Record that a prompt was sent to the endpoint, in this gateway's prefix index only."""
        if fingerprint.sampled_keys:  # a prompt shorter than one block changes nothing
            self.index.insert(fingerprint, load.slot, prompt_tokens)
            self._update_load(load)

    def learn_from_peer(
        self, keys: Keys, load: EndpointLoad, tokens_per_block: float, cached_tokens: int | None
    ) -> None:
        """Record what another gateway reports about a prompt, given the hashes of its blocks.

        cached_tokens  None: the prompt was sent to the endpoint. A number: the prompt was not
                       computed after all, and at most this many of its tokens are cached there
        """
        if cached_tokens is None:
            self.index.insert_keys(keys, load.slot, tokens_per_block)
            self._update_load(load)
            load.mark_changed()
        else:
            self.index.trim_keys(keys, load.slot, cached_tokens, tokens_per_block)

    def _update_load(self, load: EndpointLoad) -> None:
        load.prefix_cache_tokens, load.eviction_regret = (
            self.index.cached_tokens(load.slot),
            self.index.eviction_regret(load.slot),
        )

    def forget_prompt(
        self,
        fingerprint: Fingerprint,
        live: LiveEndpoint,
        cached_tokens: int,
        prompt_tokens: int,
    ) -> None:
        """Undo learn_sent() for a prompt that the endpoint never computed.

        cached_tokens  number of the prompt's first tokens that stay recorded as cached
        """
        self.index.trim(fingerprint, live.load.slot, cached_tokens, prompt_tokens)
        if self.updates is not None:
            self.updates.prompts.append((fingerprint, live.endpoint, prompt_tokens, cached_tokens))

    def forget_endpoint(self, load: EndpointLoad) -> None:
        """Forget the prompts of an endpoint that left the rotation: its cache may be gone."""
        self.index.forget(load.slot)
        load.prefix_cache_tokens = load.eviction_regret = 0.0
        load.mark_changed()

    def remove_endpoint(self, slot: int) -> None:
        """Forget all about an endpoint that left the configuration, whose slot becomes free."""
        self.index.forget(slot)
        self.index.set_capacity(slot, None)
        self.exact.remove(slot)

    # Comparison of the believed with the reported cached tokens

    def expect_cached(
        self, fingerprint: Fingerprint, live: LiveEndpoint, prompt_tokens: int
    ) -> CacheExpectation | None:
        """Predict, by the KV events, how many cached tokens the answer to this prompt reports.

        Returns None if the endpoint publishes no KV events.
        """
        return self.exact.on_sent(fingerprint, live.load.slot, prompt_tokens, monotonic())

    def on_cache_report(
        self, live: LiveEndpoint, expected: CacheExpectation, usage: TokenUsage
    ) -> None:
        """Compare the cached tokens that an answer reports with what KV events predicted."""
        endpoint = self.exact.endpoints.get(live.load.slot)
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        if endpoint is not None and prompt and cached is not None:
            endpoint.on_answer(expected, prompt, cached, monotonic())

    def confirm_cached_share(self, live: LiveEndpoint, believed: float, actual: float) -> None:
        """Compare the predicted share of a prompt's tokens in the cache with the actual share.

        `actual` is what the engine's answer reports; both are 0 to 1. This measures how reliable
        the prefix index is. Endpoints whose predictions come from KV events are left out.
        """
        if self.exact.is_exact(live.load.slot):
            return
        self.index.confirm(live.load.slot, believed, actual)
        if self.updates is not None:
            self.updates.cache_reports.append((live.endpoint, believed, actual))


def create_prefix_caches(config: Config, secret: bytes) -> PrefixCacheView:
    """Create the view of the engines' prefix caches, with the configured amounts of memory."""
    prefix = config.prefix
    return PrefixCacheView(secret, prefix.index, prefix.block_bytes, prefix.events)
