"""One booked prompt as the engine model sees it: how far it is, and what it occupies.

State only. It is changed by engine_model.py and extended by ledger.LoadBooking.
"""

from __future__ import annotations


class QueuedPrompt:
    """One booked prompt in the engine model. The fields about decoding are set at its first token.

    enters_at         policy clock when the engine's scheduler sees it
    remaining_tokens  tokens not in any step yet; computed_tokens: tokens of the prompt before those
    is_planned        its last chunk is in a step; is_decoding: past its first token; has_kv: its KV
                      is allocated
    awaits_kv         its KV is computed elsewhere and not allocated here yet
    prefix_tokens     tokens of it that were believed to be cached, whose KV may be shared with
                      other sequences
    sequences         answers generated from it; output_tokens: expected of each of them
    sees_first_token  its first token will be reported; otherwise it is assumed to come when the
                      step ends
    """

    __slots__ = (
        *(
            "computed_tokens",
            "decode_began_at",
            "awaits_kv",
            "decode_base_s",
            "decode_context_s",
            "is_decoding",
            "enters_at",
            "prefix_tokens",
            "remaining_tokens",
            "has_kv",
        ),
        *(
            "output_tokens",
            "is_planned",
            "prefill_s",
            "prefill_steps",
            "prompt_tokens",
            "sequences",
            "decode_begin_step",
            "sees_first_token",
        ),
    )

    computed_tokens: int
    decode_began_at: float
    awaits_kv: bool
    decode_base_s: float
    decode_context_s: float
    is_decoding: bool
    enters_at: float
    prefix_tokens: int
    remaining_tokens: int
    has_kv: bool
    output_tokens: float
    is_planned: bool
    prefill_s: float
    prefill_steps: int
    prompt_tokens: int
    sequences: int
    decode_begin_step: float
    sees_first_token: bool

    @property
    def uncached_tokens(self) -> int:
        """Return the tokens to compute when it arrived, at least one: the last token is always
        computed.
        """
        return max(1, self.prompt_tokens - self.prefix_tokens)

    def mark_decoding(self) -> None:
        """Mark it as decoding: its step has ended, and no first token will be reported."""

    def rejoin_timeline(self, now: float) -> None:
        """Add it to its endpoint's timeline, which has just been restarted."""
