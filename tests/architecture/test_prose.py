"""Checks docstrings, comments and pages for vague words and long sentences.

CONTRIBUTING.md has all rules for prose; this test checks those that can be counted. Limits are per
1,000 words.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.sources import PYTHON_FOLDERS, ROOT, modules, prose

MAX_PER_THOUSAND = 0.2
MAX_PER_THOUSAND_IN_PAGES = 0.3
MAX_MEAN_WORDS_OF_A_SENTENCE = 25
VAGUE = re.compile(
    r"\b(nobody|somebody|everybody|anybody|whoever|whomever|anew|besides|alike|thereof)\b"
    r"|\b(?:is|are|was|were|be|been) told\b|\btells? of\b|\bhears? of\b|\blets? go of\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z']+")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def per_thousand(text: str) -> float:
    return 1000 * len(VAGUE.findall(text)) / max(1, len(WORD.findall(text)))


@pytest.mark.parametrize("folder", PYTHON_FOLDERS)
def test_docstrings_and_comments_name_their_subjects(folder: str) -> None:
    own = "tests.architecture.test_prose"  # this module contains the vague words itself
    texts = [prose(module) for name, module in modules(folder).items() if name != own]
    assert per_thousand("\n".join(texts)) <= MAX_PER_THOUSAND


def test_pages_name_their_subjects() -> None:
    assert per_thousand("\n".join(page.read_text() for page in PAGES)) <= MAX_PER_THOUSAND_IN_PAGES


@pytest.mark.parametrize("word", ["Nobody", "it is told", "tells of", "anew"])
def test_a_vague_word_is_found(word: str) -> None:
    assert per_thousand(f"{word} waits") > 0


def test_sentences_of_pages_are_short_in_the_mean() -> None:
    text = "\n\n".join(page.read_text() for page in PAGES)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:[|#]|    ).*$", "", text, flags=re.MULTILINE)
    sentences = [part for part in re.split(r"(?<=[.!?:])\s+|\n\n|\n- ", text) if part.strip()]
    lengths = [len(WORD.findall(sentence)) for sentence in sentences]
    lengths = [length for length in lengths if length > 2]
    assert sum(lengths) / len(lengths) <= MAX_MEAN_WORDS_OF_A_SENTENCE
