"""How long prompts turn out to be: what engines count over what was estimated from the bytes.

One ratio per model, and another one for its prompts with media. Not here: the estimate itself (gateway/openai.py), and
how long answers become (lengths.py).
"""

from __future__ import annotations

LEAST_ANSWERS = 8  # before a ratio is believed, and between two updates of it
CLOSE_ENOUGH = 0.1  # an estimate within this share stands, and is then the same at every gateway of a fleet
MEMORY_TOKENS = 1 << 20  # of estimates; beyond it everything seen counts half
# The most tokens that text has per estimated token (a token per byte), and those that a chat template adds.
MOST_TOKENS, TEMPLATE_TOKENS = 4, 64
LOWEST, HIGHEST = 1 / 64, 16.0  # no tokenizer or image encoder is further off; a usage that is, is wrong


def is_text(estimated_tokens: int, prompt_tokens: int) -> bool:
    """Return whether a prompt of text alone can have so many tokens; otherwise it refers to an image or file."""
    return prompt_tokens <= MOST_TOKENS * estimated_tokens + TEMPLATE_TOKENS


class PromptLengths:
    """Ratios of counted to estimated prompt tokens, learnt from answers. One writer: the code that ends requests.

    ratios  by model and whether there are media; absent where estimates are close enough
    """

    __slots__ = ("_seen", "ratios")

    def __init__(self) -> None:
        self.ratios: dict[tuple[str, bool], float] = {}
        self._seen: dict[tuple[str, bool], list[float]] = {}

    def counted(self, model: str, has_media: bool, estimated_tokens: int, prompt_tokens: int, answers: int = 1) -> None:
        """Engines counted the tokens of so many prompts, which were estimated as `estimated_tokens`, uncorrected."""
        key = model, has_media
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = [0.0, 0.0, 0.0]
        seen[0] += answers
        seen[1] += estimated_tokens
        seen[2] += prompt_tokens
        if seen[0] >= LEAST_ANSWERS:
            self._update(key, seen)

    def _update(self, key: tuple[str, bool], seen: list[float]) -> None:
        _, estimated, counted = seen
        ratio = counted / estimated if estimated > 0 else 1.0
        if abs(ratio - 1.0) > CLOSE_ENOUGH:
            self.ratios[key] = min(HIGHEST, max(LOWEST, ratio))
        else:
            self.ratios.pop(key, None)
        kept = 0.5 if estimated > MEMORY_TOKENS else 1.0
        seen[:] = 0.0, estimated * kept, counted * kept

    def corrected(self, model: str, has_media: bool, estimated_tokens: int) -> int:
        """The estimate as like prompts of the model turned out."""
        ratio = self.ratios.get((model, has_media))
        return estimated_tokens if ratio is None else int(estimated_tokens * ratio + 0.5) or 1
