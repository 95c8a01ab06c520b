"""Tokens, chat templates and generated text without a model: four bytes are one token.

- A token sequence is `bytes`, four per token. Token ids are little-endian u32.
- Each part of a rendered prompt is padded to whole tokens. So an answer that is sent back as a
  message has the same tokens again, and its KV is found in the prefix cache.
- Generation is greedy: the next token depends only on all tokens before it, the request's `seed`
  and the number of the choice. A prompt that ends in part of an answer continues that answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from mockgpu.media import render_parts
from mockgpu.paged_kv_cache import BLOCK_TOKENS

TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES

# 128 words of three letters. With a leading space, each is one token.
WORDS = tuple(
    b" " + word
    for word in (
        b"ace act add age aid aim air ale and ant ape arc ark arm art ash asp axe bay bed "
        b"bee bow box bud bus cab cap car cat cog cot cow cub cup cut dam day den dew dog "
        b"dry ear eel egg elk elm era eve eye fan fig fin fir fit fog fox fur gap gas gem "
        b"gnu hat hay hen hop hub hue ice ink inn ivy jam jar jay jet key kit lab law leg "
        b"lid log map mat mix mud nap net nut oak oar oat orb ore owl pan paw pea pen pie "
        b"pin pod pot ram ray red rim rod rye sap sea sky son sum sun tea tin toe top toy "
        b"tub vat wax web win yak yew zoo"
    ).split()
)

_WORD_SET = frozenset(WORDS)

# A chat answer may end at the end of a block, with this chance: 128 tokens on average.
END_EVERY = 8


class GeneratedText(NamedTuple):
    """The generated answer of one choice.

    tokens     the generated tokens, four bytes each
    keys       keys of the full KV blocks of prompt and answer
    has_ended  whether the answer ended by itself; False: it was cut at its token limit
    """

    tokens: bytes
    keys: list[int]
    has_ended: bool

    @property
    def text(self) -> str:
        """Return the text of all tokens that were generated so far."""
        return self.tokens.decode()


def pad_to_tokens(part: bytes) -> bytes:
    """Return the bytes padded with newlines to a multiple of four, the size of a token."""
    return part + b"\n" * (-len(part) % TOKEN_BYTES)


def render_chat(body: Mapping[str, Any]) -> bytes:
    """Return the rendered prompt of a chat: tools, messages with roles, and the assistant's
    prefix.
    """
    parts = []
    if body.get("tools"):
        parts.append(pad_to_tokens(b"<|tools|>" + msgspec.json.encode(body["tools"])))
    for message in body["messages"]:
        parts.append(pad_to_tokens(b"<|%s|>" % str(message.get("role", "user")).encode()))
        parts.append(pad_to_tokens(_content(message.get("content"))))
        if message.get("tool_calls"):
            parts.append(pad_to_tokens(msgspec.json.encode(message["tool_calls"])))
    if body.get("add_generation_prompt", True) and not body.get("continue_final_message"):
        parts.append(pad_to_tokens(b"<|assistant|>"))
    return b"".join(parts)


def _content(content: object) -> bytes:
    if content is None:
        return b""
    parts = render_parts(content) if isinstance(content, list) else None
    if parts is not None:
        return b"".join(map(pad_to_tokens, parts))
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "\n".join(str(part["text"]) for part in content)
    return (
        content.encode("utf-8", "surrogatepass")
        if isinstance(content, str)
        else msgspec.json.encode(content)
    )


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and "text" in part


def token_bytes(prompt: str | Sequence[int]) -> bytes:
    """Convert the prompt of a completion to tokens. Text is padded to whole tokens."""
    if isinstance(prompt, str):
        return pad_to_tokens(prompt.encode("utf-8", "surrogatepass"))
    return array("I", prompt).tobytes()


def token_ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def token_count(tokens: bytes) -> int:
    """Return the number of tokens in a sequence of encoded tokens (four bytes each)."""
    return len(tokens) // TOKEN_BYTES


def block_keys(tokens: bytes) -> list[int]:
    """Return one key (hash) for each full block of tokens.

    A key depends on all tokens up to the end of its block. Equal keys mean that all these tokens
    are equal.
    """
    keys, key = [], 0
    for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = xxh3_64_intdigest(tokens[start : start + BLOCK_BYTES], key)
        keys.append(key)
    return keys


def salt_keys(keys: list[int], salt: str) -> list[int]:
    """Return the keys of blocks in a prefix cache, changed by a request's cache salt.

    So only requests with the same salt share cached blocks.
    """
    mask = xxh3_64_intdigest(salt.encode()) if salt else 0
    return [key ^ mask for key in keys] if mask else keys


def is_generated(tokens: bytes) -> bool:
    return all(
        tokens[offset : offset + TOKEN_BYTES] in _WORD_SET
        for offset in range(0, len(tokens), TOKEN_BYTES)
    )


def variation(seed: int | None, choice: int) -> int:
    """Return a number that selects one of the possible answers to the same prompt.

    It depends on the request's seed, and on the number of the choice if a request has several. It
    is 0 for the first choice of a request without a seed.
    """
    return 0 if seed is None and choice == 0 else xxh3_64_intdigest(f"{seed}/{choice}".encode())


def generate(
    prompt: bytes,
    prompt_keys: Sequence[int],
    limit: int,
    may_end: bool,
    vary: int = 0,
    at_least: int = 1,
) -> GeneratedText:
    """Generate the answer to a prompt: `limit` tokens, or fewer if `may_end` is true.

    prompt_keys  the result of `block_keys(prompt)`
    vary         number that selects one of several possible answers, see `variation()`
    at_least     minimum number of tokens before the answer may end
    """
    keys = list(prompt_keys)
    key = keys[-1] if keys else 0
    tail = prompt[len(keys) * BLOCK_BYTES :]
    words: list[bytes] = []
    ended = False
    while len(words) < limit and not ended:
        word = WORDS[xxh3_64_intdigest(tail, key ^ vary) & 127]
        words.append(word)
        tail += word
        if len(tail) == BLOCK_BYTES:
            key, tail = xxh3_64_intdigest(tail, key), b""
            keys.append(key)
            ended = may_end and len(words) >= at_least and (key ^ vary) % END_EVERY == 0
    return GeneratedText(b"".join(words), keys, ended)


def expected_text(body: Mapping[str, Any], n_tokens: int, choice: int = 0) -> str:
    """Return the first `n_tokens` tokens of a mock engine's answer to this request. For tests."""
    prompt = render_chat(body) if "messages" in body else token_bytes(body["prompt"])
    return generate(
        prompt, block_keys(prompt), n_tokens, False, variation(body.get("seed"), choice)
    ).text
