"""Corrects estimated prompt lengths by the lengths that engines report.

The gateway estimates a prompt's tokens from its bytes. PromptLengths learns one factor per model,
and a second one for the model's prompts with images or other media. Answer lengths are in
output_length.py.
"""

from __future__ import annotations

LEAST_ANSWERS = 8  # number of answers before a ratio is used, and between two updates of it
# Estimates with a smaller relative error are not corrected, so that all gateways of a fleet use the
# same estimate.
CLOSE_ENOUGH = 0.1
MEMORY_TOKENS = 1 << 20  # estimated tokens after which the weight of the history is halved
# Maximum tokens of text per estimated token (one per byte), and of a chat template.
MOST_TOKENS, TEMPLATE_TOKENS = 4, 64
# Limits of a plausible ratio; outside of them the reported usage is wrong.
LOWEST, HIGHEST = 1 / 64, 16.0


def is_text(estimated_tokens: int, prompt_tokens: int) -> bool:
    """Return whether the length that an engine reported is plausible for a prompt with only text.

    estimated_tokens  the gateway's own estimate, from the bytes of the text
    prompt_tokens     the length that the engine reported

    If the reported length is far greater, the prompt probably refers to an image or a file.
    """
    return prompt_tokens <= MOST_TOKENS * estimated_tokens + TEMPLATE_TOKENS


class PromptLengths:
    """Learns the ratio of reported to estimated prompt tokens, per model.

    It remembers at most `most` ratios, because names of adapters come and go. The model whose last
    answer is oldest is dropped first. Prompts with media have a ratio of their own.

    ratios  ratio by (model, whether the prompt has media); absent if estimates are close enough
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
        """Learn from the reported length of `answers` prompts of one model.

        has_media         whether the prompts have images or other media
        estimated_tokens  sum of the estimates, before any correction
        prompt_tokens     sum of the lengths that the engines reported
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
        """Return the estimated number of prompt tokens, corrected by the learned ratio.

        The ratio depends on the model and on whether the prompt has media. If none is learned, the
        estimate is returned unchanged.
        """
        ratio = self.ratios.get((model, has_media))
        if ratio is None:
            return estimated_tokens
        # float.__trunc__() takes a third of the time of int().
        return (estimated_tokens * ratio + 0.5).__trunc__() or 1
