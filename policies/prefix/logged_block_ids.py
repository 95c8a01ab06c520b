"""Computes ids of prompt blocks for a log, so that shared prefixes can be recognised there.

The ids do not reveal prompts. They depend on a secret and on the tenant. A tenant that sends a
guessed prompt and reads the log finds only its own ids, even if tenants share an engine's cache.
gateway/telemetry/accounting.py puts them into the log.
"""

from __future__ import annotations

import hashlib
from array import array

from policies.prefix.fingerprint import Fingerprint
from policies.prefix.key_loops import scramble_keys
from policies.prefix.sampled_keys import Keys

ID_BLOCK_BYTES = 2048
MOST_TENANTS = 1024
NO_IDS: Keys = array("Q")


class BlockIds:
    """Computes ids of prompt blocks for a log: they show shared prefixes, but no prompts.

    Equal prefixes of one tenant have equal ids. Processes compute the same ids if both this secret
    and the secret of their fingerprints are the same.
    """

    __slots__ = ("_numbers", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret[:64]
        self._numbers: dict[str, tuple[int, int]] = {}

    def session_id(self, session: str) -> int:
        """Return a 48-bit id to write to a log instead of a session's key; 0 for "".

        The key cannot be guessed from the id.
        """
        if not session:
            return 0
        digest = hashlib.blake2b(
            session.encode("utf-8", "surrogatepass"),
            digest_size=6,
            key=self._secret,
            person=b"penstock-session",
        ).digest()
        return int.from_bytes(digest, "little") or 1

    def ids(self, fingerprint: Fingerprint, tenant: str) -> Keys:
        """Return 48-bit ids, one for each complete block of `ID_BLOCK_BYTES` of the prompt.

        Each id identifies the whole prompt up to the end of the block. Blocks are at least as large
        as the fingerprint's blocks.
        """
        step = ID_BLOCK_BYTES // fingerprint.block_bytes or 1
        if len(fingerprint.keys) < step:  # most prompts of a chat's first turn
            return NO_IDS
        offset, factor = self._numbers.get(tenant) or self._draw(tenant)
        return scramble_keys(fingerprint.keys, step, offset, factor)

    def _draw(self, tenant: str) -> tuple[int, int]:
        digest = hashlib.blake2b(
            tenant.encode(), digest_size=16, key=self._secret, person=b"penstock-log"
        ).digest()
        offset, factor = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        if len(self._numbers) >= MOST_TENANTS:
            self._numbers.clear()
        numbers = self._numbers[tenant] = offset, factor | 1
        return numbers
