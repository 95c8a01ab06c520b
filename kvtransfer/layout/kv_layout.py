"""KvLayout: describes where a model's KV cache lies in the memory of an engine's GPUs.

It contains no KV. transfer_plan.py derives from two layouts which bytes are copied where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec

_MAXIMA: Mapping[str, int] = MappingProxyType(
    {
        "layers": 4096,
        "kv_heads": 4096,
        "head_dim": 1 << 16,
        "block_tokens": 1 << 16,
        "tp": 512,
        "pp": 256,
    }
)
_MAX_BLOCKS = 1 << 24
_MAX_SCALE_BYTES = 64
_MAX_FORMAT_CHARS = 64


class KvDtype(StrEnum):
    """The data type of one number (scalar) in a KV cache."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"

    @property
    def n_bytes(self) -> int:
        return _SCALAR_BYTES.get(self, 1)


_SCALAR_BYTES = MappingProxyType({KvDtype.FP32: 4, KvDtype.BF16: 2, KvDtype.FP16: 2})


class KvOrder(StrEnum):
    """The order of dimensions in memory, from the outermost to the innermost, as in vLLM 0.32.

    L: layers, B: blocks, H: heads, N: tokens of a block, C: content of one token and head (its key
    and value; see KvContent)
    """

    LBHNC = "lbhnc"
    LBNHC = "lbnhc"
    LHBNC = "lhbnc"
    BLHNC = "blhnc"
    BLNHC = "blnhc"
    BHLNC = "bhlnc"

    @property
    def is_block_outermost(self) -> bool:
        """Return whether the bytes of one block, with all its layers, are contiguous."""
        return self.value[0] == "b"


class KvContent(StrEnum):
    """How keys and values are placed, which depends on the engine's attention backend.

    PLANES   first the keys of all heads and tokens of a block in a layer, then the values
    HEADS    for each head, first the keys of the block's tokens, then the values
    TOKENS   for each token and head, first the key, then the value (vLLM's FlashAttention, Triton)
    PAGES    one page per head and block, in a format of the backend, in which single tokens cannot
             be located (vLLM's CPU backend). Only whole pages can be copied
    """

    PLANES = "planes"
    HEADS = "heads"
    TOKENS = "tokens"
    PAGES = "pages"


class KvSteps(NamedTuple):
    """The distances in bytes between neighbouring layers, blocks, heads and tokens of a rank.

    part  distance in bytes from the keys to the values
    """

    layer: int
    block: int
    part: int
    head: int
    token: int


class KvLayout(msgspec.Struct, frozen=True):
    """The shape of an engine's KV cache, and the place of each number in memory.

    layers        number of transformer layers with a cache
    kv_heads      key/value heads of the model (not of a rank); 1 with MLA
    head_dim      numbers per head; with MLA: per token and layer (kv_lora_rank + rope dimensions)
    dtype         data type of one number
    block_tokens  tokens per block
    tp            number of tensor-parallel ranks. The heads are divided among them; with more ranks
                  than heads, several ranks hold the same head
    mla           whether each tensor-parallel rank holds one latent vector per token instead of
                  keys and values (multi-head latent attention)
    order         order of layers, blocks, heads and tokens in a rank's memory
    pp            number of pipeline stages; stage s holds the layers from s * layers // pp on
    content       how keys and values are placed; only one way is possible with MLA
    blocks        number of blocks in each rank's memory; 0 means unknown, which is allowed if
                  blocks are the outermost dimension
    scale_bytes   bytes of the quantisation scale after each row (keys or values of one token and
                  head); 0 means none
    page_format   name of the pages' format if `content` is PAGES

    The rank (stage, tp rank) has the number stage * tp + tp rank. Its memory has no gaps.

    Raises ValueError for an impossible shape. Numbers are limited, so that a plan for a layout that
    another agent sends can always be computed.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int
    tp: int = 1
    mla: bool = False
    order: KvOrder = KvOrder.BLHNC
    pp: int = 1
    content: KvContent = KvContent.PLANES
    blocks: int = 0
    scale_bytes: int = 0
    page_format: str = ""

    def __post_init__(self) -> None:
        for name, maximum in _MAXIMA.items():
            if not 1 <= getattr(self, name) <= maximum:
                raise ValueError(
                    f"the KV layout's {name} must be 1 to {maximum}, not {getattr(self, name)}"
                )
        if self.mla and self.kv_heads != 1:
            raise ValueError(f"a latent (MLA) KV cache has one head, not {self.kv_heads}")
        if max(self.tp, self.kv_heads) % min(self.tp, self.kv_heads):
            raise ValueError(
                f"{self.kv_heads} KV heads can be neither split nor repeated evenly over "
                f"{self.tp} ranks"
            )
        if self.pp > self.layers:
            raise ValueError(f"{self.layers} layers are too few for {self.pp} pipeline stages")
        self._check_memory()

    def _check_memory(self) -> None:
        if not 0 <= self.blocks <= _MAX_BLOCKS or not 0 <= self.scale_bytes <= _MAX_SCALE_BYTES:
            raise ValueError(
                f"the KV layout's blocks ({self.blocks}) or scale_bytes ({self.scale_bytes}) "
                "is negative or too large"
            )
        if not (self.blocks or self.order.is_block_outermost):
            raise ValueError(
                f"the memory order {self.order} places blocks by their total number: set blocks "
                f"to at least 1, not {self.blocks}"
            )
        has_pages = self.content is KvContent.PAGES
        if has_pages != bool(self.page_format) or len(self.page_format) > _MAX_FORMAT_CHARS:
            raise ValueError(
                "page_format must be a short name if the content is pages, and empty otherwise"
            )
        if self.mla and not has_pages:
            return
        inner = self.order.value[-3:]
        if self.content in (KvContent.HEADS, KvContent.PAGES) and inner == "nhc":
            raise ValueError(
                f"the KV layout cannot combine the content {self.content} with the memory "
                f"order {self.order}"
            )
        if self.content is KvContent.PLANES and inner not in ("hnc", "nhc"):
            raise ValueError(
                "the KV layout cannot combine the content planes with the memory order "
                f"{self.order}"
            )

    @property
    def ranks(self) -> int:
        return self.pp * self.tp

    @property
    def parts(self) -> int:
        """Return how many vectors a token has in a layer and head: key and value, or 1 with MLA."""
        return 1 if self.mla else 2

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row: the key, or the value, of one head and token in one
        layer.
        """
        return self.head_dim * self.dtype.n_bytes + self.scale_bytes

    @property
    def rank_heads(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token's KV in the whole model. Heads on several ranks count
        once.
        """
        return self.layers * self.parts * self.kv_heads * self.row_bytes

    @property
    def rank_layer_bytes(self) -> int:
        return self.parts * self.rank_heads * self.block_tokens * self.row_bytes

    def rank_block_bytes(self, rank: int) -> int:
        return len(self.layers_of(rank // self.tp)) * self.rank_layer_bytes

    def layers_of(self, stage: int) -> range:
        """Return which layers of the model the ranks of a pipeline stage have.

        Raises IndexError for a stage that does not exist.
        """
        if not 0 <= stage < self.pp:
            raise IndexError(f"there is no pipeline stage {stage}; the layout has {self.pp}")
        return range(stage * self.layers // self.pp, (stage + 1) * self.layers // self.pp)

    def heads_of(self, tp_rank: int) -> range:
        """Return which heads of the model a tensor-parallel rank has; they are the same in every
        stage.

        Raises IndexError for a rank that does not exist.
        """
        if not 0 <= tp_rank < self.tp:
            raise IndexError(
                f"there is no tensor-parallel rank {tp_rank}; the layout has {self.tp}"
            )
        first = tp_rank * self.kv_heads // self.tp
        return range(first, first + self.rank_heads)

    def steps(self, stage: int) -> KvSteps:
        """Return the distances in bytes between neighbouring layers, blocks, heads and tokens.

        They are the same in all ranks of this pipeline stage.
        """
        sizes = {
            "l": len(self.layers_of(stage)),
            "b": self.blocks,
            "p": self.parts,
            "h": self.rank_heads,
            "n": self.block_tokens,
        }
        steps, step = {}, self.row_bytes
        for axis in reversed(self._axes()):
            steps[axis], step = step, step * sizes[axis]
        return KvSteps(*(steps[axis] for axis in sizes))

    def _axes(self) -> str:
        axes = self.order.value[:-1]
        if self.content is KvContent.TOKENS or self.mla:
            return axes + "p"
        place = len(axes) - 2 if self.content is KvContent.PLANES else axes.index("n")
        return axes[:place] + "p" + axes[place:]

    def has_same_blocks(self, other: KvLayout) -> bool:
        """Return whether one layer of a block has the same bytes in the same order in both layouts.

        The bytes are contiguous, so they can be copied together with the neighbouring layers.
        """
        return self.order.value.startswith("bl") and all(
            getattr(self, name) == getattr(other, name)
            for name in ("block_tokens", "rank_heads", "order", "content")
        )

    def fingerprint(self) -> str:
        """Return a hash of 16 hex digits by which two processes can compare their KV layouts.

        It is equal for equal layouts, in all processes and Python versions.
        """
        return _fingerprint(self)

    def mismatch(self, other: KvLayout) -> str | None:
        """Return why KV of the layout `other` cannot be copied into this layout; None if it can.

        Ranks, stages, block size, memory order and the places of keys and values may differ. The
        model's shape and the data type must be equal, because bytes of another type would be read
        as garbage without an error. Pages can only be copied to pages of the same format.
        """
        names = ["mla", "layers", "kv_heads", "head_dim", "dtype", "scale_bytes"]
        if KvContent.PAGES in (self.content, other.content):
            names += ["content", "page_format", "block_tokens"]
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine} here, {theirs} there"
        return None


@lru_cache(64)
def _fingerprint(layout: KvLayout) -> str:
    encoded = msgspec.json.encode(layout)
    return hashlib.blake2b(encoded, digest_size=8, person=b"kv-layout").hexdigest()


@lru_cache(64)
def pair_fingerprint(src: KvLayout, dst: KvLayout) -> str:
    """Return a hash of two layouts, by which two agents check that both use the same ones.

    src, dst  layouts of the sending and the receiving engine
    """
    return f"{src.fingerprint()}-{dst.fingerprint()}"
