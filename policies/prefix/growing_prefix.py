"""Recognises conversations by their growing prompts, if the client sends no session id.

A client that sends the whole conversation each time repeats the previous prompt, and appends the
answer and a new message. GrowingPrefixes finds which prompt continues which. policies/admission/
counts the sessions.
"""

from __future__ import annotations

import re
from array import array
from itertools import islice

from policies.prefix.fingerprint import Fingerprint
from policies.prefix.key_loops import count_places, find_last_counted

REMEMBERED = 16_384
"""Default number of prompts whose ends are stored; each takes about 300 bytes."""
MAX_LISTED_BLOCKS = 8
"""Maximum number of blocks of a new prompt that are searched for the end of an earlier prompt.

The search goes from the last block to the first, and counts only blocks in which an earlier prompt
of the same bytes ended.
"""
MAX_GROWTH_BYTES = 1024 * 1024
"""Maximum number of bytes of new messages that are searched for the model's answer.

New messages are those added since the previous turn.
"""

_COUNTS = 1 << 18
_MAX_BLANKS = 64
_BRACE, _BRACKET = b"}]"
_CLOSED = re.compile(rb"\}[ \t\r\n]{0,%d}\][ \t\r\n]{0,%d}\Z" % (_MAX_BLANKS, _MAX_BLANKS))
_NEXT_MESSAGE = re.compile(rb"\}(?=[ \t\r\n]{0,%d},)" % _MAX_BLANKS)
_ANSWERS = (b'"assistant"', b'"function_call"')
"""JSON text that marks messages produced by a model.

It contains unescaped quotes, so it cannot come from a user's words.
"""


class GrowingPrefixes:
    """Remembers the ends of recent prompts, to recognise later prompts of the same conversation.

    The end of a prompt is the key of its last whole block, plus the bytes after that block up to
    the end of the last message. A session gets its name at the second turn, because a prompt that
    is never continued is not a session.
    """

    __slots__ = ("_blocks", "_counts", "_ends", "_remembered")

    def __init__(self, remembered: int = REMEMBERED) -> None:
        # Initialize without prompts; at most `remembered` ends of recent prompts are stored.
        self._remembered = remembered
        self._ends: dict[int, tuple[int, str]] = {}  # block key and session name by end
        self._blocks: dict[int, int] = {}  # number of stored ends by block key
        # The same by some bits of the key, which rules most blocks out without a look-up.
        self._counts = array("I", bytes(4 * _COUNTS))

    def __len__(self) -> int:
        return len(self._ends)

    def recognise(
        self, scope: str, fingerprint: Fingerprint, preamble_bytes: int, messages: memoryview
    ) -> str:
        """Return the name of the session that a prompt continues; "": it continues none.

        scope           tenant; prompts of different scopes are never compared
        preamble_bytes  bytes of the prompt before its messages
        messages        the JSON array at the end of the prompt
        """
        length = _messages_length(messages)
        index = (preamble_bytes + length) // fingerprint.block_bytes if length else 0
        if not 0 < index <= len(fingerprint.keys):
            return ""
        key = fingerprint.keys[index - 1]
        begin = max(0, index * fingerprint.block_bytes - preamble_bytes)
        end = hash((scope, key, bytes(messages[begin:length])))
        stored = self._ends.get(end)
        # A stored end is that of the same prompt, which may be a retry.
        name = (
            self._continued(scope, fingerprint, preamble_bytes, messages)
            if stored is None
            else stored[1]
        )
        self._store(end, key, name)
        return name

    def _continued(
        self, scope: str, fingerprint: Fingerprint, preamble_bytes: int, messages: memoryview
    ) -> str:
        # Return the session of the longest stored prompt that this prompt continues.
        #
        # Return "" if there is none.
        keys, size = fingerprint.keys, fingerprint.block_bytes
        remaining, index = MAX_LISTED_BLOCKS, len(keys)
        while remaining:
            index = find_last_counted(keys, self._counts, index)
            if index < 0:
                break
            key = keys[index]
            if key not in self._blocks:
                continue
            begin = (index + 1) * size - preamble_bytes
            end = self._end_in_block(scope, key, begin, begin + size, messages)
            if end is not None:
                return self._named(end)
            remaining -= 1
        return ""

    def _end_in_block(
        self, scope: str, key: int, begin: int, stop: int, messages: memoryview
    ) -> int | None:
        start = max(0, begin)
        window = bytes(messages[start : max(0, stop) + _MAX_BLANKS + 1])
        # 0: the message may have ended with the block before.
        cuts = [0, *(match.end() for match in _NEXT_MESSAGE.finditer(window))]
        for cut in reversed(cuts):
            end = hash((scope, key, window[:cut]))
            if end in self._ends:
                added = bytes(messages[start + cut : start + cut + MAX_GROWTH_BYTES])
                if any(answer in added for answer in _ANSWERS):
                    return end
        return None

    def _named(self, end: int) -> str:
        # Return the session name of the prompt with this end, and create the name if there is none.
        key, name = self._ends[end]
        name = name or f"{end & 0xFFFFFFFFFFFFFFFF:016x}"
        self._store(end, key, name)
        return name

    def _store(self, end: int, key: int, name: str) -> None:
        if self._ends.pop(end, None) is None:
            self._blocks[key] = self._blocks.get(key, 0) + 1
            for place in count_places(key, _COUNTS):
                self._counts[place] += 1
        self._ends[end] = (key, name)
        if len(self._ends) > self._remembered:
            # Several at a time, because finding the oldest entry of a dict visits all places that
            # are empty since a deletion.
            for oldest in list(islice(self._ends, 1 + self._remembered // 256)):
                self._drop(self._ends.pop(oldest)[0])

    def _drop(self, key: int) -> None:
        # Record that one end less is stored in the block with this key.
        for place in count_places(key, _COUNTS):
            self._counts[place] -= 1
        self._blocks[key] -= 1
        if not self._blocks[key]:
            del self._blocks[key]


def _messages_length(messages: memoryview) -> int:
    # Return the length in bytes of a JSON array of messages without its closing bracket.
    #
    # Return 0 if the text is not such an array.
    length = len(messages)
    if length > 1 and messages[length - 1] == _BRACKET and messages[length - 2] == _BRACE:
        return length - 1
    closing = _CLOSED.search(bytes(messages[-2 * _MAX_BLANKS - 2 :]))
    return 0 if closing is None else length - (closing.end() - closing.start()) + 1
