"""Creates the model for the tests with real engines: a small Llama with random weights.

Run `random_llama.py FOLDER [deep]` with an interpreter that has torch and transformers. The
tokenizer is trained on the pages of this project's documentation. Nothing is downloaded.

The deep model has 16 layers and a large KV cache: 6.6 MB per layer for 1,100 tokens.

vLLM's own dummy weights are too small for tests. With them, all tokens are equally likely, whatever
the KV cache contains. Here the weights are so large that every key and value affects the output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


# Overrides of the small model's configuration.
DEEP = {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 96}


def main(folder: Path, *, is_deep: bool) -> None:
    """Write the tokenizer, the configuration and the weights into a folder.

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
    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config = LlamaConfig(
        vocab_size=len(fast),
        max_position_embeddings=8192,
        initializer_range=SPREAD,
        eos_token_id=fast.eos_token_id,
        **(shape | DEEP if is_deep else shape),
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_deep=sys.argv[2:] == ["deep"])
