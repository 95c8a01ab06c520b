"""Creates the models for the tests with real engines: small ones with random weights.

Run `random_llama.py FOLDER [KIND]` with an interpreter that has torch and transformers. The
tokenizer is trained on the pages of this project's documentation. Nothing is downloaded.

Without a kind, the model is a Llama of two layers. The other kinds are in KINDS.

vLLM's own dummy weights are too small for tests. With them, all tokens are equally likely, whatever
the KV cache contains. Here the weights are so large that every key and value affects the output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY = 2048
SPREAD = 0.15
"""Standard deviation of the random weights: attention scores are then neither uniform nor
one-hot.
"""

SEED = 7
CHAT = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}

WINDOW = 256
"""Attention window of the models with sliding windows, in tokens: two blocks of vLLM on CPUs"""

KINDS: dict[str, dict[str, Any]] = {
    # 6.6 MB of KV per layer for 1,100 tokens, in 16 layers.
    "deep": {
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 96,
    },
    # One KV head, which two ranks repeat.
    "one-head": {"num_key_value_heads": 1},
    # Multi-head latent attention, without experts. vLLM's kernels for CPUs have one size of rows.
    "latent": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "head_dim": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,
    },
    # Sliding windows in all layers.
    "window": {"model_type": "mistral", "sliding_window": WINDOW},
    # A sliding window in the first of two layers, and full attention in the second.
    "windows-and-full": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Other models than the small Llama, by name: members of their configuration that differ."""


def main(folder: Path, kind: str) -> None:
    """Write a small Llama model with random weights, with its configuration and tokenizer.

    The folder takes 2.5 MB, or 17 MB for the deep model.
    """
    tokenizer = ByteLevelBPETokenizer()
    pages = sorted(str(page) for page in (ROOT / "docs").rglob("*.md"))
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.train(pages, vocab_size=VOCABULARY, special_tokens=special)
    ends = dict.fromkeys(("eos_token", "pad_token"), "<|end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **ends)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        **(SMALL | KINDS.get(kind, {})),
        vocab_size=len(fast),
        max_position_embeddings=8192,
        initializer_range=SPREAD,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or ["small"]))
