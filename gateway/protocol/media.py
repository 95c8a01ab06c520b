"""Detects base64 media in prompts (images, audio, files), which must not be counted as text.

For estimates and fingerprints, media in raw JSON are replaced by placeholders. Engines receive the
original body. policies/admission/prompt_length.py learns how many tokens media take.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from gateway.protocol.image_size import image_tokens

MEDIA_TOKENS = 1024
"""Number of tokens assumed for an image without known dimensions, or another medium, until the
engine reports usage.
"""
BYTES_PER_TOKEN = 4  # the usual estimate for English text and code (GIE and llm-d use the same)
MOST_BYTES_PER_TOKEN = 16  # no tokenizer is expected to need fewer tokens for a text

MIN_MEDIUM_BYTES = MEDIA_TOKENS * BYTES_PER_TOKEN
"""Minimum length of base64 media in bytes. Shorter media are counted as text, because their text
has fewer than MEDIA_TOKENS tokens.
"""
_WINDOW = 64
_STEP = MIN_MEDIUM_BYTES - _WINDOW
_DIGEST_BYTES = 32
# A member whose value is base64, a data URL, or a list of these. Members that hold text are
# excluded by name.
_MEMBER = (
    rb'"(?!(?:text|content|arguments|refusal|reasoning|reasoning_content|name|id)")'
    rb'\w{1,64}":[ \t\r\n]{0,8}'
)
_DATA_URL = re.compile(rb'data:[^",]{0,200},')
_PARAMETERS = rb'(?:data:[^",]{0,200},)?'  # of a data URL; they may contain blanks
_BASE64 = rb"[A-Za-z0-9+/=_:;,.%%\\-]{%d,}" % MIN_MEDIUM_BYTES
_MEDIUM = re.compile(rb'(%b")%b%b' % (_MEMBER, _PARAMETERS, _BASE64))
_LIST_ITEM = re.compile(rb'(")%b%b' % (_PARAMETERS, _BASE64))
_LIST = re.compile(
    rb'(%b\[[ \t\r\n]{0,8})((?:"%b%b"[ \t\r\n]{0,8}(?:,[ \t\r\n]{0,8})?)+)'
    % (_MEMBER, _PARAMETERS, _BASE64)
)


class MediaSize(NamedTuple):
    """The number of media (images, audio, files) in a prompt, and the tokens that they are
    estimated to take.
    """

    parts: int = 0
    tokens: int = 0


NO_MEDIA = MediaSize()


def may_contain_media(body: bytes) -> bool:
    """Return whether a body may contain base64 media, judged by sampling.

    Text has a blank or a quote every few words, so a few samples suffice to rule media out.
    """
    for start in range(_STEP, len(body), _STEP):
        end = start + _WINDOW
        if body.find(b" ", start, end) < 0 and body.find(b'"', start, end) < 0:
            return True
    return False


def replace_media(prompt: bytes) -> tuple[bytes, MediaSize]:
    """Replace each medium in the prompt's JSON by a placeholder; return the prompt and the size of
    the media.

    A placeholder has as many bytes as text with the medium's number of tokens. It is derived from
    the medium's hash, so prompts with different media differ, and prompts with equal media share
    their beginning.
    """
    sizes: list[int] = []

    def replace_one(match: re.Match[bytes]) -> bytes:
        text, tokens = _stand_in(memoryview(match.string)[match.end(1) : match.end()])
        sizes.append(tokens)
        return match[1] + text

    def replace_items(match: re.Match[bytes]) -> bytes:
        return match[1] + _LIST_ITEM.sub(replace_one, match[2])

    without = _MEDIUM.sub(replace_one, _LIST.sub(replace_items, prompt))
    return without, MediaSize(len(sizes), sum(sizes))


def _stand_in(medium: memoryview) -> tuple[bytes, int]:
    # Return the placeholder for a medium (base64, or a data URL with it), and its tokens.
    digest = hashlib.blake2b(medium, digest_size=_DIGEST_BYTES).hexdigest().encode()
    data_url = _DATA_URL.match(medium)
    tokens = image_tokens(medium if data_url is None else medium[data_url.end() :])
    repeats = (tokens or MEDIA_TOKENS) * BYTES_PER_TOKEN // len(digest)
    return digest * repeats, repeats * len(digest) // BYTES_PER_TOKEN
