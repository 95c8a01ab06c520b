"""Creates random BERT models for the tests with real engines: embedding, reranker and classifier.

Run `random_berts.py FOLDER` with the Python interpreter of the engines. It writes three models:

FOLDER/embedding   an encoder, for embeddings
FOLDER/reranker    a cross-encoder with one score per pair of texts
FOLDER/classifier  a classifier with three classes

The tokenizer is trained on the pages of this project's documentation. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY, CONTEXT = 2048, 512
SPREAD = 0.3
"""Standard deviation of the random weights: large enough that different texts get clearly different
results.
"""

SEED = 7


def main(folder: Path) -> None:
    """Write three small BERT models with random weights into a folder, each with its tokenizer.

    Each takes about 1 MB.
    """
    words = BertWordPieceTokenizer()
    pages = sorted(str(page) for page in (ROOT / "docs").rglob("*.md"))
    words.train(pages, vocab_size=VOCABULARY)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=CONTEXT,
    )
    torch.manual_seed(SEED)
    for name, model in (
        ("embedding", BertModel(_config(len(tokenizer)))),
        ("reranker", BertForSequenceClassification(_config(len(tokenizer), num_labels=1))),
        ("classifier", BertForSequenceClassification(_config(len(tokenizer), num_labels=3))),
    ):
        _save(model, tokenizer, folder / name)


def _config(vocabulary: int, **members: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        **members,
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
