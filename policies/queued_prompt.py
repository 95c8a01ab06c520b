"""One booked prompt as the engine model sees it: how far it is, and what it holds.

State only. The engine model that moves it is paper.py; the booking that extends it is ledger.Entry.
"""

from __future__ import annotations


class Prompt:
    """One booked prompt on paper. What it knows of decoding is set at its first token.

    enters    policy clock when the engine's scheduler sees it
    left, at  tokens in no step yet, and tokens of the prompt before those
    planned   its last chunk is in a step; decoding  it is past its first token; locked  it has its KV
    coming    its KV is computed elsewhere, and has no room here yet
    had       tokens of it that were believed to be cached, and so may be somebody else's as well
    sequences answers that grow from it; output_tokens  expected of each of them
    told      somebody will tell of its first token; else it is believed to come when the step ends
    """

    __slots__ = (
        *("at", "began", "coming", "decode_base_s", "decode_context_s", "decoding", "enters", "had", "left", "locked"),
        *("output_tokens", "planned", "prefill_s", "prefill_steps", "prompt_tokens", "sequences", "tick", "told"),
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
        """Tokens that were to be computed when it came: the last one always is."""
        return max(1, self.prompt_tokens - self.had)

    def computed(self) -> None:
        """Its first token is made, or believed to be where nobody will tell: it decodes."""

    def join(self, now: float) -> None:
        """Its endpoint's timeline begins anew, with it."""
