"""Writes a small Llama with random weights as a GGUF file, for tests with llama.cpp.

Run `random_llama_gguf.py FILE`. The model has two layers and a vocabulary of bytes and common
words; the file has 0.5 MB. It needs the packages numpy and gguf.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, CONTEXT = 2, 64, 4, 2, 128, 8192
TEXT = (
    "the of and to in a is for water wheel gate river stream pipe dam turns runs opens closes why "
    "how what deep long count from one two three four five six seven eight nine ten"
)
WORDS = TEXT.split()
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}assistant: "
)


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Return the vocabulary of the GGUF model as three lists: tokens, their scores and their types.

    The values are those of a SentencePiece model, in the order of the token identifiers.
    """
    kinds = gguf.TokenType
    tokens = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL)]
    tokens.append(("</s>", 0.0, kinds.CONTROL))
    tokens += [(f"<0x{byte:02X}>", 0.0, kinds.BYTE) for byte in range(256)]
    tokens += [(f"\u2581{word}", -float(rank), kinds.NORMAL) for rank, word in enumerate(WORDS)]
    texts, scores, types = zip(*tokens, strict=True)
    return list(texts), list(scores), [int(kind) for kind in types]


def write(path: Path) -> None:
    """Write a small Llama model to a GGUF file.

    Its weights are random, but the same in every run.
    """
    writer = gguf.GGUFWriter(path, "llama")
    _add_description(writer)
    _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_description(writer: gguf.GGUFWriter) -> None:
    # Add the model's sizes, its tokenizer and its chat template.
    texts, scores, types = vocabulary()
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(7)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(0.0, 0.3, shape).astype(np.float32)

    texts, _, _ = vocabulary()
    writer.add_tensor("token_embd.weight", weights(len(texts), WIDTH))
    writer.add_tensor("output.weight", weights(len(texts), WIDTH))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    kv_width = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        writer.add_tensor(name + "attn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(name + "ffn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(name + "attn_q.weight", weights(WIDTH, WIDTH))
        writer.add_tensor(name + "attn_k.weight", weights(kv_width, WIDTH))
        writer.add_tensor(name + "attn_v.weight", weights(kv_width, WIDTH))
        writer.add_tensor(name + "attn_output.weight", weights(WIDTH, WIDTH))
        writer.add_tensor(name + "ffn_gate.weight", weights(HIDDEN, WIDTH))
        writer.add_tensor(name + "ffn_up.weight", weights(HIDDEN, WIDTH))
        writer.add_tensor(name + "ffn_down.weight", weights(WIDTH, HIDDEN))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
