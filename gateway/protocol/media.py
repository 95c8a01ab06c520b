"""Base64 media in prompts: images, audio and files, which must not be counted as text.

Finds them in raw JSON and replaces them by stand-ins for estimates and fingerprints. What engines
receive does not change. How many tokens media take is learnt in
policies/admission/prompt_length.py.
"""

from __future__ import annotations

import hashlib
import re

MEDIA_TOKENS = 1024
"""Tokens assumed for one medium until usage is known; a one-megapixel image takes 750 to 1,400."""
BYTES_PER_TOKEN = 4  # the usual estimate for English text and code (GIE and llm-d use the same)
MOST_BYTES_PER_TOKEN = 16  # no tokenizer is expected to need fewer tokens for a text

MIN_MEDIUM_BYTES = MEDIA_TOKENS * BYTES_PER_TOKEN
"""Bytes of base64; anything shorter is counted as text, since that is less than MEDIA_TOKENS."""
_WINDOW = 64
_STEP = MIN_MEDIUM_BYTES - _WINDOW
_DIGEST_BYTES = 32
# A member whose value is base64, a data URL, or a list of these. Members that hold text are
# excluded by name.
_MEMBER = (
    rb'"(?!(?:text|content|arguments|refusal|reasoning|reasoning_content|name|id)")'
    rb'\w{1,64}":[ \t\r\n]{0,8}'
)
_PARAMETERS = rb'(?:data:[^",]{0,200},)?'  # of a data URL; they may contain blanks
_BASE64 = rb"[A-Za-z0-9+/=_:;,.%%\\-]{%d,}" % MIN_MEDIUM_BYTES
_MEDIUM = re.compile(rb'(%b")%b%b' % (_MEMBER, _PARAMETERS, _BASE64))
_LIST_ITEM = re.compile(rb'(")%b%b' % (_PARAMETERS, _BASE64))
_LIST = re.compile(
    rb'(%b\[[ \t\r\n]{0,8})((?:"%b%b"[ \t\r\n]{0,8}(?:,[ \t\r\n]{0,8})?)+)'
    % (_MEMBER, _PARAMETERS, _BASE64)
)


def may_contain_media(body: bytes) -> bool:
    """Whether the body may contain media, judged by sampling.

    Text has a blank or a quote every few words, so a few windows are enough to rule media out.
    """
    for start in range(_STEP, len(body), _STEP):
        end = start + _WINDOW
        if body.find(b" ", start, end) < 0 and body.find(b'"', start, end) < 0:
            return True
    return False


def replace_media(prompt: bytes) -> tuple[bytes, int]:
    """Replace each medium in the prompt's JSON by a stand-in of MEDIA_TOKENS; return their number.

    A stand-in is derived from the medium's hash, so prompts with different media differ.
    """
    list_count = 0

    def replace_items(match: re.Match[bytes]) -> bytes:
        nonlocal list_count
        replaced, count = _LIST_ITEM.subn(_stand_in, match[2])
        list_count += count
        return match[1] + replaced

    without, member_count = _MEDIUM.subn(_stand_in, _LIST.sub(replace_items, prompt))
    return without, member_count + list_count


def _stand_in(match: re.Match[bytes]) -> bytes:
    medium = memoryview(match.string)[match.end(1) : match.end()]
    digest = hashlib.blake2b(medium, digest_size=_DIGEST_BYTES)
    return match[1] + digest.hexdigest().encode() * (MIN_MEDIUM_BYTES // (2 * _DIGEST_BYTES))
