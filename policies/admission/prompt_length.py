"""Corrects estimated prompt lengths by the lengths that engines report.

PromptLengths keeps one ratio per model, and a second one for the model's prompts with images or
other media. The gateway makes the estimate itself; answer lengths are in output_length.py.
"""

from __future__ import annotations

LEAST_ANSWERS = 8  # answers before a ratio is used, and between two updates of it
# Smaller relative errors are ignored, so that all gateways of a fleet use the same estimate.
CLOSE_ENOUGH = 0.1
MEMORY_TOKENS = 1 << 20  # estimated tokens, after which the history is halved
# Maximum tokens of text per estimated token (one per byte), and of a chat template.
MOST_TOKENS, TEMPLATE_TOKENS = 4, 64
# Limits of a plausible ratio; outside of them the reported usage is wrong.
LOWEST, HIGHEST = 1 / 64, 16.0


def is_text(estimated_tokens: int, prompt_tokens: int) -> bool:
    """Return whether a reported prompt length is plausible for a prompt that contains only text.

    estimated_tokens  the gateway's own estimate, from the bytes of the text
    prompt_tokens     the length that the engine reported

    A far greater length than estimated means that the prompt refers to an image or file.
    """
    return prompt_tokens <= MOST_TOKENS * estimated_tokens + TEMPLATE_TOKENS


class PromptLengths:
    """Learns the ratio of reported to estimated prompt tokens from answers.

    At most `most` models are remembered, with and without media apart, because adapters come and
    go by new names; the one without answers for the longest time is dropped first.

    ratios  ratio by (model, whether the prompt has media); absent where estimates are close enough
    """

    __slots__ = ("_most", "_sums", "ratios")

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self.ratios: dict[tuple[str, bool], float] = {}
        self._sums: dict[tuple[str, bool], list[float]] = {}

    def record(
        self,
        model: str,
        has_media: bool,
        estimated_tokens: int,
        prompt_tokens: int,
        answers: int = 1,
    ) -> None:
        """Learn from the reported length of `answers` prompts and their uncorrected estimate.

        has_media         whether the prompts have images or other media
        estimated_tokens  sum of the estimates, before any correction
        prompt_tokens     sum of the prompt tokens that the engines counted
        """
        key = model, has_media
        sums = self._sums[key] = self._sums.pop(key, [0.0, 0.0, 0.0])
        if len(self._sums) > self._most:
            oldest = next(iter(self._sums))
            del self._sums[oldest]
            self.ratios.pop(oldest, None)
        sums[0] += answers
        sums[1] += estimated_tokens
        sums[2] += prompt_tokens
        if sums[0] >= LEAST_ANSWERS:
            self._update(key, sums)

    def _update(self, key: tuple[str, bool], sums: list[float]) -> None:
        _, estimated, counted = sums
        ratio = counted / estimated if estimated > 0 else 1.0
        if abs(ratio - 1.0) > CLOSE_ENOUGH:
            self.ratios[key] = min(HIGHEST, max(LOWEST, ratio))
        else:
            self.ratios.pop(key, None)
        decay = 0.5 if estimated > MEMORY_TOKENS else 1.0
        sums[:] = 0.0, estimated * decay, counted * decay

    def correct(self, model: str, has_media: bool, estimated_tokens: int) -> int:
        """Return the estimated number of prompt tokens, multiplied by the learned ratio where there
        is one.

        The ratio is the one for the model and for prompts with or without media (`has_media`).
        """
        ratio = self.ratios.get((model, has_media))
        if ratio is None:
            return estimated_tokens
        # float.__trunc__() takes a third of the time of int().
        return (estimated_tokens * ratio + 0.5).__trunc__() or 1
