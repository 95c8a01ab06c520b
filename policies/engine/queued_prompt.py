"""One booked prompt as the engine model sees it: how far it is, and what it occupies.

State only. It is changed by engine_model.py and extended by ledger.LoadBooking.
"""

from __future__ import annotations


class Prompt:
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
            "at",
            "began",
            "coming",
            "decode_base_s",
            "decode_context_s",
            "decoding",
            "enters",
            "had",
            "left",
            "locked",
        ),
        *(
            "output_tokens",
            "planned",
            "prefill_s",
            "prefill_steps",
            "prompt_tokens",
            "sequences",
            "tick",
            "told",
        ),
    )

    at: int
    began: float
    coming: bool
    decode_base_s: float
    decode_context_s: float
    decoding: bool
    enters: float
    had: int
    left: int
    locked: bool
    output_tokens: float
    planned: bool
    prefill_s: float
    prefill_steps: int
    prompt_tokens: int
    sequences: int
    tick: float
    told: bool

    @property
    def fresh(self) -> int:
        """Return the tokens to compute when it arrived, at least one: the last token is always
        computed.
        """
        return max(1, self.prompt_tokens - self.had)

    def computed(self) -> None:
        """Mark it as decoding: its step has ended, and no first token will be reported."""

    def join(self, now: float) -> None:
        """Add it to its endpoint's timeline, which has just been restarted."""
