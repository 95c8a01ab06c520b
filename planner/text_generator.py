"""Generates text with a known number of tokens.

The text consists of three-letter English words. A word and its space are 4 bytes and one token.
Equal keys give equal text on every machine, so prompts share exactly the prefixes that a trace or
workload defines.
"""

from __future__ import annotations

import hashlib

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 512

_WORDS = (
    "ace act add age ago aid aim air all and ant any ape arc are ark arm art ash ask ate awe axe bad bag "
    "bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bun bus but buy cab can cap car cat "
    "cow cry cub cup cut dam day den dew did dig dim dip dog dot dry due dug dye ear eat egg ego elf elk "
    "elm end era eve ewe eye fan far fat fax fed fee few fig fin fir fit fix fly foe fog for fox fun fur "
    "gap gas gel gem get gum gun gut guy had hat hay her him hip his hit hog hop hot how hub hug hut ice "
    "ink inn its "
)
_TABLE = tuple(word.encode() + b" " for word in _WORDS.split()) * 2


def block(*key: object) -> str:
    """Return a text of 512 tokens (2,048 bytes) that depends only on this key."""
    digest = hashlib.shake_128(repr(key).encode()).digest(BLOCK_TOKENS)
    return b"".join(map(_TABLE.__getitem__, digest)).decode()


def text(tokens: int, *key: object) -> str:
    """Return a reproducible text of `tokens` tokens, which depends only on the key.

    A longer text begins with the shorter texts of the same key.
    """
    blocks = (block(*key, index) for index in range(-(-tokens // BLOCK_TOKENS)))
    return "".join(blocks)[: tokens * BYTES_PER_TOKEN]
