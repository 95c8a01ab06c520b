"""Detects base64 media in prompts (images, audio, files), which must not be counted as text.

Before a prompt's length is estimated and its blocks are hashed, placeholders replace the media.
Engines receive the original body. policies/admission/prompt_length_correction.py learns how many
tokens media take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from xxhash import xxh3_128_hexdigest

from gateway.protocol.request.image_size import image_tokens

MEDIA_TOKENS = 1024
"""Number of tokens assumed for an image without known dimensions, or another medium, until the
engine reports usage.
"""
BYTES_PER_TOKEN = 4  # the usual estimate for English text and code (GIE and llm-d use the same)
MOST_BYTES_PER_TOKEN = 16  # no tokenizer is expected to need fewer tokens for a text

EMBEDDING_BYTES_PER_TOKEN = 10_923
"""Base64 bytes assumed for the embedding of one token: 4,096 numbers of 16 bits."""

MIN_MEDIUM_BYTES = MEDIA_TOKENS * BYTES_PER_TOKEN
"""Minimum length of base64 media in bytes. Shorter media are counted as text, because their text
has fewer than MEDIA_TOKENS tokens.
"""
_WINDOW = 64
_STEP = MIN_MEDIUM_BYTES - _WINDOW
_MAX_SAMPLES = 64  # of one medium; 1,000 samples of an image of 3 MB would take a millisecond
# Matches a member whose value is base64, a data URL, or a list of these. Members that contain text
# are excluded by their names.
_MEMBER = (
    rb'"(?!(?:text|content|arguments|refusal|reasoning|reasoning_content|name|id)")'
    rb'\w{1,64}":[ \t\r\n]{0,8}'
)
_DATA_URL = re.compile(rb'data:[^",]{0,200},')
# beginning of a data URL, whose parameters may contain blanks
_PARAMETERS = rb'(?:data:[^",]{0,200},)?'
_BASE64 = b"A-Za-z0-9+/=_:;,.%%\\\\-"
_START = rb"%b[%b]{%d}" % (_PARAMETERS, _BASE64, MIN_MEDIUM_BYTES)
_MEDIUM = re.compile(rb'(%b")%b' % (_MEMBER, _START))
_LIST = re.compile(rb'%b\[[ \t\r\n]{0,8}(?="%b)' % (_MEMBER, _START))
_LIST_ITEM = re.compile(rb'([ \t\r\n]{0,8}(?:,[ \t\r\n]{0,8})?")%b' % _START)
_RUN = re.compile(rb"[%b]*" % _BASE64)
_DATA_URLS = re.compile(rb'\[?[ \t\r\n]{0,8}"data:')
_LONGEST_MEMBER = 80  # bytes of a member's name with its quotes, colon and blanks


class MediaSize(msgspec.Struct, frozen=True):
    """The number of media (images, audio, files) in a prompt, and their estimated tokens."""

    parts: int = 0
    tokens: int = 0


NO_MEDIA = MediaSize()


def may_contain_media(body: bytes) -> bool:
    """Return whether a body may contain base64 media. Only samples of its bytes are examined.

    Text contains blanks and quotes, and base64 does not. Therefore a few samples show that a body
    has no media.
    """
    for start in range(_STEP, len(body), _STEP):
        end = start + _WINDOW
        if body.find(b" ", start, end) < 0 and body.find(b'"', start, end) < 0:
            return True
    return False


def replace_media(body: bytes, start: int, end: int) -> tuple[bytes, MediaSize]:
    """Replace each medium in the JSON of a prompt by a placeholder.

    Returns the new prompt, and the size of the media. The prompt is `body[start:end]`, which is not
    copied, because allocating memory for a copy would take longer than everything else.

    A placeholder has as many bytes as text with the medium's number of tokens. It is derived from
    the medium's hash. Therefore prompts with different media differ, and prompts that begin with
    the same media have a common prefix.

    The prompt itself may be a data URL or a list of data URLs, if its name precedes it in `body`.
    """
    sizes, pieces, copied = list[int](), list[bytes](), start
    view = memoryview(body)
    for first, last in _media(body, start, end):
        text, tokens = _stand_in(view[first:last])
        sizes.append(tokens)
        pieces += (body[copied:first], text)
        copied = last
    return b"".join([*pieces, body[copied:end]]), MediaSize(len(sizes), sum(sizes))


def replace_embeddings(
    prompt: tuple[msgspec.Raw, ...], embeddings: msgspec.Raw
) -> tuple[tuple[msgspec.Raw, ...], MediaSize]:
    """Replace the embeddings of prompts (base64 tensors) among the parts of a prompt.

    Returns the new parts, and the size of the embeddings. The placeholder has as many bytes as text
    with their number of tokens.
    """
    digest = xxh3_128_hexdigest(memoryview(embeddings)).encode()
    tokens = len(embeddings) // EMBEDDING_BYTES_PER_TOKEN
    repeats = max(1, tokens * BYTES_PER_TOKEN // len(digest))
    stand_in = msgspec.Raw(digest * repeats)
    size = MediaSize(1, len(stand_in) // BYTES_PER_TOKEN)
    return tuple(stand_in if part is embeddings else part for part in prompt), size


def _media(body: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    # Yield where each medium begins and ends, in the prompt's order: members, and items of lists.
    #
    # If the prompt itself consists of data URLs, the search begins at the name of its member. No
    # medium of an earlier member is found, because its data would have to include that name.
    position = start
    if _DATA_URLS.match(body, start, end):
        position = max(0, start - _LONGEST_MEMBER)
    member = _MEDIUM.search(body, position, end)
    while True:
        limit = end if member is None else member.start()
        items = _LIST.search(body, position, limit)
        if items is not None:
            position = items.end()
            while item := _LIST_ITEM.match(body, position, limit):
                position = _medium_end(body, item.end(), limit)
                yield item.end(1), position
                position += 1  # the closing quote
        elif member is not None:
            position = _medium_end(body, member.end(), end)
            yield member.end(1), position
            member = _MEDIUM.search(body, position, end)
        else:
            return


def _medium_end(body: bytes, position: int, end: int) -> int:
    # Return where the base64 text around `position` ends: at the next quote, if samples of the
    # bytes before are base64, else at the first other byte. Samples take a tenth of the time.
    quote = body.find(b'"', position, end)
    last = end if quote < 0 else quote
    step = max(_STEP, (last - position) // _MAX_SAMPLES)
    starts = (*range(position, last, step), max(position, last - _WINDOW))
    if body.find(b" ", position, last) < 0 and all(
        _run(body, start, min(start + _WINDOW, last)) == min(start + _WINDOW, last)
        for start in starts
    ):
        return last
    return _run(body, position, end)


def _run(body: bytes, start: int, end: int) -> int:
    # Return where the base64 text that begins at `start` ends, at `end` at the latest.
    run = _RUN.match(body, start, end)
    return start if run is None else run.end()


def _stand_in(medium: memoryview) -> tuple[bytes, int]:
    # Return the placeholder for a medium (base64, or a data URL with it), and its tokens.
    digest = xxh3_128_hexdigest(medium).encode()
    data_url = _DATA_URL.match(medium)
    tokens = image_tokens(medium if data_url is None else medium[data_url.end() :])
    repeats = (tokens or MEDIA_TOKENS) * BYTES_PER_TOKEN // len(digest)
    return digest * repeats, repeats * len(digest) // BYTES_PER_TOKEN
