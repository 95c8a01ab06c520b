"""KvLayout: how a TP group lays out the KV cache of one model, and whether another group's would fit into it.

Not here: which shard goes where (that is planning), or any byte of a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

_MOST: Mapping[str, int] = MappingProxyType(
    {
        "layers": 4096,
        "kv_heads": 4096,
        "head_dim": 1 << 16,
        "block_tokens": 1 << 16,
        "tp": 512,
        "pp": 256,
    }
)


class KvDtype(StrEnum):
    """The type of one cached scalar."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def n_bytes(self) -> int:
        return 2 if self in (KvDtype.BF16, KvDtype.FP16) else 1


class KvOrder(StrEnum):
    """Which is outer in one layer's keys (or values) of a block: HND heads, then tokens; NHD tokens, then heads."""

    HND = "hnd"
    NHD = "nhd"


class KvLayout(msgspec.Struct, frozen=True):
    """The shape of a group's KV cache, and where each scalar lies.

    layers        transformer layers with a cache
    kv_heads      key/value heads of the model (not of a rank); 1 with MLA
    head_dim      scalars per head; with MLA the latent of one token and layer (kv_lora_rank + rope dimensions)
    dtype         of one scalar
    block_tokens  tokens per block of the paged cache
    tp            tensor-parallel ranks; heads are split until each rank has one, then repeated
    mla           one latent per token in place of separate keys and values, held by every tensor-parallel rank
    order         of heads and tokens inside a block
    pp            pipeline stages; stage s holds the layers from s * layers // pp on

    Rank (stage, tp rank) has the number stage * tp + tp rank. Its cache is one run of blocks; inside a block follow
    each other its layers, in each the keys and then the values, in those the rows in `order`, in each row the scalars.
    Raises ValueError for a shape that no engine could have. The upper bounds keep a peer's layout computable.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int
    tp: int = 1
    mla: bool = False
    order: KvOrder = KvOrder.HND
    pp: int = 1

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is at least 1 and at most {most}, not {getattr(self, name)}"
                )
        if self.mla and self.kv_heads != 1:
            raise ValueError(f"a latent cache has one head, not {self.kv_heads}")
        if max(self.tp, self.kv_heads) % min(self.tp, self.kv_heads):
            raise ValueError(
                f"{self.kv_heads} heads can be neither split nor repeated evenly over {self.tp} ranks"
            )
        if self.pp > self.layers:
            raise ValueError(f"{self.layers} layers are too few for {self.pp} stages")

    @property
    def ranks(self) -> int:
        return self.pp * self.tp

    @property
    def parts(self) -> int:
        """Rows per layer, head and token: keys and values, or the latent alone."""
        return 1 if self.mla else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token's keys in one layer: the smallest piece that is ever moved."""
        return self.head_dim * self.dtype.n_bytes

    @property
    def rank_heads(self) -> int:
        """Heads on one rank."""
        return max(1, self.kv_heads // self.tp)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the model, every head counted once."""
        return self.layers * self.parts * self.kv_heads * self.row_bytes

    @property
    def rank_layer_bytes(self) -> int:
        """Bytes of one layer of one block on one rank."""
        return self.parts * self.rank_heads * self.block_tokens * self.row_bytes

    def rank_block_bytes(self, rank: int) -> int:
        """Bytes of one block on `rank`."""
        return len(self.layers_of(rank // self.tp)) * self.rank_layer_bytes

    def layers_of(self, stage: int) -> range:
        """The layers that every rank of a pipeline stage holds. IndexError for a stage that is not."""
        if not 0 <= stage < self.pp:
            raise IndexError(f"stage {stage} of {self.pp}")
        return range(stage * self.layers // self.pp, (stage + 1) * self.layers // self.pp)

    def heads_of(self, tp_rank: int) -> range:
        """The heads that a tensor-parallel rank holds, in every stage. IndexError for a rank that is not."""
        if not 0 <= tp_rank < self.tp:
            raise IndexError(f"rank {tp_rank} of {self.tp}")
        first = tp_rank * self.kv_heads // self.tp
        return range(first, first + self.rank_heads)

    def same_block(self, other: KvLayout) -> bool:
        """Whether one layer of a block is the same bytes on a rank of either: neighbouring layers then move as one."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("block_tokens", "rank_heads", "order")
        )

    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly for equal layouts, the same in every process and version of Python."""
        return hashlib.blake2b(
            msgspec.json.encode(self), digest_size=8, person=b"kv-layout"
        ).hexdigest()

    def mismatch(self, other: KvLayout) -> str | None:
        """Why a cache of `other` can never become one of this layout; None if resharding is enough.

        Ranks, stages, block sizes and order may differ, those are re-cut on the way. Shape and type may not: bytes of
        another type would be read as numbers all the same, and decode as garbage without an error.
        """
        for name in ("mla", "layers", "kv_heads", "head_dim", "dtype"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine} here, {theirs} there"
        return None


def fingerprint_of(src: KvLayout, dst: KvLayout) -> str:
    """Of the two layouts between which a plan is made: both ends must mean the same ones."""
    return f"{src.fingerprint()}-{dst.fingerprint()}"
