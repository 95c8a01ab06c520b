"""The state of one reserved prompt in the engine model: its progress, and the KV that it uses.

scheduler_model.py changes the state. load_ledger.LoadReservation extends the class QueuedPrompt.
"""

from __future__ import annotations


class QueuedPrompt:
    """One prompt in the model of its engine: its progress, and the KV memory that it uses.

    enters_at         time at which the engine's scheduler receives the prompt, on the policy clock
    prompt_tokens     number of its tokens
    remaining_tokens  prompt tokens that no planned step computes yet
    computed_tokens   the prompt tokens before `remaining_tokens`
    is_planned        whether the last chunk of the prompt is in a planned step
    is_decoding       whether the first token has arrived
    has_kv            whether KV memory is allocated for the prompt
    awaits_kv         whether another endpoint computes the prompt, and no KV memory is allocated
                      here yet
    prefix_tokens     prompt tokens that were believed to be cached, whose KV other sequences may
                      share
    sequences         number of answers generated from the prompt
    output_tokens     expected output tokens of each answer
    length_class      age class of its answer at the last check (RunningAnswers); -1 before the
                      first token and after the end
    per_expected_token   1 divided by the answer length that was expected at that check
    sees_first_token  whether the first token can be observed; otherwise it is assumed to arrive
                      when the step ends

    When the first token arrives, its time is stored in `decode_began_at`. The counters of the
    engine model at that time (EngineModel) are stored in `decode_begin_step`, `prefill_steps`,
    `prefill_s`, `decode_base_s` and `decode_context_s`.
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
            "length_class",
            "per_expected_token",
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
    length_class: int
    per_expected_token: float
    sees_first_token: bool

    @property
    def uncached_tokens(self) -> int:
        """Return how many prompt tokens had to be computed when the prompt arrived.

        The result is at least 1, because the last token is always computed, even if it is cached.
        """
        return max(1, self.prompt_tokens - self.prefix_tokens)

    def mark_decoding(self) -> None:
        """Mark the prompt as decoding at the end of its step.

        This is for a prompt whose first token will not be reported.
        """

    def rejoin_timeline(self, now: float) -> None:
        """Add the prompt to its endpoint's engine model, which was just restarted."""
