"""Records the lengths and block ids of ended requests, to detect drift of the workload.

gateway/drift uses the records. They contain no text: a block id is a keyed hash of a block of the
prompt. In a worker process, the supervisor collects the records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from policies.sizing.workload_drift import request_tokens

MAX_IDS = 1 << 17
"""Maximum number of block ids in records that have not been taken yet; further records are dropped
and counted.
"""


class ShapeRecord(msgspec.Struct, frozen=True, array_like=True):
    """The lengths of an ended request, to compare them with what its pool was sized for.

    at_s     Unix time of its end
    session  id of its session; 0 for none
    blocks   ids of the complete blocks of its prompt
    """

    pool: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: int
    blocks: Sequence[int]


class ShapeRecorder:
    """Records of ended requests, kept in bounded memory until they are taken.

    pools    pools whose requests are recorded
    dropped  number of records lost since the start
    """

    __slots__ = ("_ids", "_records", "dropped", "pools")

    def __init__(self) -> None:
        self.pools: Collection[str] = frozenset()
        self.dropped = 0
        self._records: list[ShapeRecord] = []
        self._ids = 0

    def add(
        self,
        exchange: Exchange,
        relay: Relay,
        usage: TokenUsage,
        at_s: float,
        blocks: Sequence[int],
        session: int,
    ) -> None:
        """Record the shape of an ended request: its lengths, and the ids of its prompt's blocks.

        Refused, failed and abandoned requests are left out, as in replays of the access log.

        exchange  the record of the request
        relay     the relay of its answer
        usage     its token counts
        at_s      Unix time of its end
        blocks    ids of the complete blocks of its prompt
        session   id of its session; 0 for none
        """
        pick = exchange.pick
        if pick is None or not 0 < exchange.status < 400:
            return
        prompt, output = request_tokens(
            usage.prompt_tokens, exchange.body_bytes, usage.completion_tokens, relay.event_count
        )
        if not prompt:
            return
        if self._ids > MAX_IDS:
            self.dropped += 1
            return
        pool = pick.candidate.endpoint.pool
        self._records.append(ShapeRecord(pool, at_s, prompt, output, session, blocks))
        self._ids += 1 + len(blocks)

    def pop_records(self) -> list[ShapeRecord]:
        """Return and forget the records that were added since the last call, oldest first."""
        records, self._records, self._ids = self._records, [], 0
        return records
