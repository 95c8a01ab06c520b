"""The common form of a recorded request, which all trace readers yield, and its block ids.

Most other modules of this package read one format. trace_lines.py reads lines of any format.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from planner.text_generator import BLOCK_TOKENS, BYTES_PER_TOKEN, block

# Block ids have 64 bits: the lower 48 are the trace's own, the next 8 the number of a mix's part
# (mix.py), the upper 8 the copy of a repeated session (planner/replay/traffic.py).
TRACE_BITS, PART_BITS = 48, 8
# 2^64 divided by the golden ratio. Its multiples modulo 2^64 are far apart.
_GOLDEN = 0x9E3779B97F4A7C15
PRIVATE = 1 << 32
"""The first block id that belongs to a single session; smaller ids may be shared between
sessions.
"""

BlockId = Annotated[int, Meta(ge=0, lt=1 << TRACE_BITS)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
"""Number of tokens in a file. No model reads 16 million tokens; more is an error in the file."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request, in the common form of all trace formats.

    arrival_s      arrival in seconds from the beginning of its trace
    input_tokens   tokens of its prompt
    output_tokens  tokens of its answer
    blocks         chained 64-bit ids: equal ids mean equal prompts up to the end of that block,
                   including the incomplete last block. Empty: the prompt is unknown and shares
                   nothing
    block_tokens   tokens per block, at least 1
    session        key of its session; "": none
    think_s        seconds between the answer to the previous request of its session and this
                   request (closed loop); None: sent at arrival_s, whatever the other requests do
    tenant         name of its tenant
    slo            name of its service class
    priority       its priority; higher is served first
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    session: str = ""
    think_s: float | None = None
    tenant: str = ""
    slo: str = ""
    priority: int = 0

    def prompt(self) -> str:
        """Return a prompt text; two prompts share text exactly where they share block ids.

        It has `input_tokens` tokens. Only blocks of 512 tokens are supported.
        """
        return "".join(block("mooncake", one) for one in self.blocks)[
            : self.input_tokens * BYTES_PER_TOKEN
        ]


def to_64_bits(number: int) -> int:
    """Return a block id of a trace, reduced to 64 bits if it is larger."""
    return (number + (number >> 64) * _GOLDEN) % (1 << 64)
