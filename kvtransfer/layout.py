"""KvLayout: how a TP group lays out the KV cache of one model, and whether another group's would fit into it.

Not here: which shard goes where (that is planning), or any byte of a cache.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec


class KvDtype(StrEnum):
    """The type of one cached scalar."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def n_bytes(self) -> int:
        return 2 if self in (KvDtype.BF16, KvDtype.FP16) else 1


class KvLayout(msgspec.Struct, frozen=True):
    """The shape of a group's KV cache.

    layers        transformer layers with a cache
    kv_heads      key/value heads of the model (not of a rank); 1 with MLA
    head_dim      scalars per head; with MLA the latent of one token and layer (kv_lora_rank + rope dimensions)
    dtype         of one scalar
    block_tokens  tokens per block of the paged cache
    tp            ranks of the group
    mla           one latent per token in place of separate keys and values, held by every rank

    Raises ValueError for a shape that no engine could have.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int
    tp: int = 1
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.mla and self.kv_heads != 1:
            raise ValueError(f"a latent cache has one head, not {self.kv_heads}")
        if max(self.tp, self.kv_heads) % min(self.tp, self.kv_heads):
            raise ValueError(f"{self.kv_heads} heads can be neither split nor repeated evenly over {self.tp} ranks")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the model, every head counted once."""
        scalars = self.head_dim if self.mla else 2 * self.kv_heads * self.head_dim
        return self.layers * scalars * self.dtype.n_bytes

    @property
    def rank_bytes_per_token(self) -> int:
        """Bytes that one token takes on one rank: heads are split until each rank has one, then repeated."""
        return self.bytes_per_token // min(self.tp, self.kv_heads)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.rank_bytes_per_token * self.block_tokens

    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly for equal layouts, the same in every process and version of Python."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8, person=b"kv-layout").hexdigest()

    def mismatch(self, other: KvLayout) -> str | None:
        """Why a cache of `other` can never become one of this layout; None if resharding is enough.

        Ranks and block sizes may differ, those are re-cut on the way. Shape and type may not: bytes of another type
        would be read as numbers all the same, and decode as garbage without an error.
        """
        for name in ("mla", "layers", "kv_heads", "head_dim", "dtype"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine} here, {theirs} there"
        return None
