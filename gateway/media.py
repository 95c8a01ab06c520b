"""Media in prompts: images, audio and files that stand in a request as base64 must not count as text.

Lives here: finding them in raw JSON, and the bytes that replace them for estimates and fingerprints. What is sent to
engines is never changed. Not here: how many tokens they really take, which is learnt (policies/prompt_lengths.py).
"""

from __future__ import annotations

import hashlib
import re

MEDIA_TOKENS = 1024
"""What one image, recording or file counts for until usage says more: one megapixel takes 750 to 1,400 tokens."""
BYTES_PER_TOKEN = 4  # the usual estimate for English text and code (GIE and llm-d use the same)
MOST_BYTES_PER_TOKEN = 16  # a text with more bytes per token is not expected from any tokenizer

LEAST_MEDIUM = MEDIA_TOKENS * BYTES_PER_TOKEN
"""Bytes of base64; fewer count as text: as less than a medium of their own would."""
_WINDOW = 64
_STEP = LEAST_MEDIUM - _WINDOW
_DIGEST_BYTES = 32
# A member's string of base64 or a data URL, or a list of such strings. Members of text are left out, whatever is in
# them.
_MEMBER = rb'"(?!(?:text|content|arguments|refusal|reasoning|reasoning_content|name|id)")\w{1,64}":[ \t\r\n]{0,8}'
_PARAMETERS = rb'(?:data:[^",]{0,200},)?'  # of a data URL; they may have blanks
_BASE64 = rb"[A-Za-z0-9+/=_:;,.%%\\-]{%d,}" % LEAST_MEDIUM
_MEDIUM = re.compile(rb'(%b")%b%b' % (_MEMBER, _PARAMETERS, _BASE64))
_LISTED = re.compile(rb'(")%b%b' % (_PARAMETERS, _BASE64))
_LIST = re.compile(
    rb'(%b\[[ \t\r\n]{0,8})((?:"%b%b"[ \t\r\n]{0,8}(?:,[ \t\r\n]{0,8})?)+)' % (_MEMBER, _PARAMETERS, _BASE64)
)


def may_hold_media(body: bytes) -> bool:
    """Whether there may be a medium: text has a blank or a quote every few words, so a few looks rule one out."""
    for at in range(_STEP, len(body), _STEP):
        end = at + _WINDOW
        if body.find(b" ", at, end) < 0 and body.find(b'"', at, end) < 0:
            return True
    return False


def without_media(prompt: bytes) -> tuple[bytes, int]:
    """The prompt's JSON with a stand-in of MEDIA_TOKENS for each medium, and how many there were.

    The stand-in is made of the medium's hash: prompts with other media are other prompts from there on.
    """
    count = 0

    def listed(match: re.Match[bytes]) -> bytes:
        nonlocal count
        replaced, more = _LISTED.subn(_stand_in, match[2])
        count += more
        return match[1] + replaced

    without, members = _MEDIUM.subn(_stand_in, _LIST.sub(listed, prompt))
    return without, members + count


def _stand_in(found: re.Match[bytes]) -> bytes:
    digest = hashlib.blake2b(memoryview(found.string)[found.end(1) : found.end()], digest_size=_DIGEST_BYTES)
    return found[1] + digest.hexdigest().encode() * (LEAST_MEDIUM // (2 * _DIGEST_BYTES))
