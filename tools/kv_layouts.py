"""Lists which KV cache layouts can be transferred between engines with different numbers of GPUs.

The list is used in three places:

- tests/contract/kvtransfer/layouts transfers every layout between two processes
- tests/real/test_layouts.py does the same with memory that vLLM's own classes create
- docgen.py writes the page docs/reference/kv-layouts.md

The rows contain plain values only. The tests build the memory from them with their own code, so
that a bug in kvtransfer cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

TP_PAIRS = ((1, 2), (2, 1), (2, 4), (4, 2))


class ProofKind(StrEnum):
    """The kinds of tests that prove that a KV cache layout is transferred correctly.

    ENGINE  two running vLLM engines give the same answer as one engine alone
    VLLM    a transfer between tensors that vLLM's own classes created, without running a model
    MODEL   a transfer between memory that the test arranged by its own description of the layout
    """

    ENGINE = "E"
    VLLM = "V"
    MODEL = "M"


class CacheType(NamedTuple):
    """The data type of the numbers in a KV cache.

    dtype        name of the type in kvtransfer's class KvLayout, such as "bf16"
    n_bytes      size of one number in bytes
    scale_bytes  size of the scale stored after the numbers of each head and token; 0 for no scale
    """

    dtype: str
    n_bytes: int
    scale_bytes: int = 0


CACHE_TYPES: Mapping[str, CacheType] = MappingProxyType(
    {
        "float32": CacheType("fp32", 4),
        "bfloat16": CacheType("bf16", 2),
        "float16": CacheType("fp16", 2),
        "fp8": CacheType("fp8_e4m3", 1),
        "fp8_e5m2": CacheType("fp8_e5m2", 1),
        "fp8_per_token_head": CacheType("fp8_e4m3", 1, 4),
        "int8_per_token_head": CacheType("int8", 1, 4),
    }
)


class CacheMemory(NamedTuple):
    """How an engine arranges the KV cache in its memory.

    content       place of keys and values, as in KvLayout: "planes", "tokens", "heads" or "pages"
    order         order of the dimensions, such as "lbhnc": layer, block, head, token, content
    block_tokens  number of tokens in a block
    page_format   name of the format of pages; "" if the content is not "pages"
    cache_type    vLLM's name of the data type, if it differs from the row's; otherwise ""
    """

    content: str
    order: str
    block_tokens: int = 16
    page_format: str = ""
    cache_type: str = ""


class LayoutRow(NamedTuple):
    """One row of the table of KV layouts: a transfer between two engines, and its expected result.

    cache         description of the cache
    kv_heads      number of key/value heads of the model; 1 for latent caches
    source        memory of the sending engine
    sink          memory of the receiving engine
    cache_types   vLLM's names of the data types that are tested
    is_latent     whether each token has one latent vector (MLA) instead of keys and values
    windows       attention window of each cache group in tokens (0: full); () for one group
    refusal       part of the error message if the transfer is refused; "" if it works
    backend       vLLM's attention backend in the tests with vLLM's classes; "" without such tests
    engine_pairs  ((source ranks, sink ranks), data type) of each test with running engines
    """

    cache: str
    kv_heads: int
    source: CacheMemory
    sink: CacheMemory
    cache_types: tuple[str, ...]
    is_latent: bool = False
    windows: tuple[int, ...] = ()
    refusal: str = ""
    backend: str = ""
    engine_pairs: tuple[tuple[tuple[int, int], str], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return all tested pairs: tensor-parallel ranks at the source, and at the sink."""
        return TP_PAIRS

    def proofs(self, pair: tuple[int, int]) -> list[ProofKind]:
        """Return the kinds of tests that transfer this layout between these numbers of ranks.

        pair  numbers of tensor-parallel ranks of the source and of the sink
        """
        proofs = [ProofKind.MODEL] + [ProofKind.VLLM] * bool(self.backend)
        return proofs + [ProofKind.ENGINE] * any(pair == there for there, _ in self.engine_pairs)


_ALL = tuple(CACHE_TYPES)
_TWO = ("bfloat16", "fp8_per_token_head")
_HND, _NHD = CacheMemory("tokens", "lbhnc"), CacheMemory("tokens", "lbnhc")
_BLOCK_HND, _BLOCK_NHD = CacheMemory("tokens", "blhnc"), CacheMemory("tokens", "blnhc")
_HEAD_FIRST = CacheMemory("tokens", "lhbnc"), CacheMemory("tokens", "bhlnc")
_PAGES = CacheMemory("pages", "lbhnc", page_format="cpu-vec")
_PLAIN = ("float32", "bfloat16", "fp8")
_TRITON, _CPU = "TRITON_ATTN", "CPU_ATTN"
# Tested by tests/real/test_cache_kinds.py, with a model of two key/value heads.
_ENGINES = (((2, 1), "float32"), ((1, 2), "float32"))


def _moving() -> tuple[LayoutRow, ...]:
    gqa = [
        LayoutRow("GQA, 8 heads", 8, source, sink, _ALL, backend=_TRITON)
        for source, sink in product((_HND, _NHD), repeat=2)
    ]
    return (
        *gqa,
        LayoutRow("GQA, 8 heads", 8, _BLOCK_HND, _BLOCK_NHD, _TWO, backend=_TRITON),
        LayoutRow("GQA, 8 heads", 8, *_HEAD_FIRST, _TWO, backend=_TRITON),
        LayoutRow("GQA, 8 heads", 8, _HND, _NHD._replace(block_tokens=32), _TWO, backend=_TRITON),
        LayoutRow("GQA, 8 heads", 8, CacheMemory("planes", "blhnc"), _NHD, _TWO),
        LayoutRow("GQA, 8 heads", 8, CacheMemory("heads", "lbhnc"), _HND, _TWO),
        LayoutRow("GQA, 8 heads", 8, _PAGES, _PAGES, _PLAIN, backend=_CPU),
        LayoutRow(
            "GQA, 2 heads: repeated with 4 ranks", 2, _HND, _NHD, _TWO, backend=_TRITON
        ),
        LayoutRow(
            "GQA, 2 heads: repeated with 4 ranks", 2, _PAGES, _PAGES, _PLAIN,
            backend=_CPU, engine_pairs=_ENGINES,
        ),
        LayoutRow("one head (MQA): always repeated", 1, _NHD, _HND, _TWO, backend=_TRITON),
        LayoutRow("one head (MQA): always repeated", 1, _PAGES, _PAGES, _PLAIN, backend=_CPU),
        LayoutRow("latent (MLA): every rank has all", 1, _HND, _HND, ("bfloat16", "fp8"),
                  is_latent=True, backend="TRITON_MLA"),
        LayoutRow("latent (MLA): every rank has all", 1, _HND, _BLOCK_NHD, ("bfloat16", "fp8"),
                  is_latent=True, backend="TRITON_MLA"),
        LayoutRow("latent (MLA) of vLLM on CPUs", 1, _HND, _HND,
                  ("float32", "bfloat16"), is_latent=True, backend="CPU_MLA"),
        LayoutRow("sliding window in all layers", 2, _PAGES, _PAGES, _PLAIN,
                  windows=(40,), backend=_CPU),
        LayoutRow("sliding windows in one group with full attention", 2, _PAGES, _PAGES,
                  _PLAIN, backend=_CPU),
        *(
            LayoutRow("sliding window beside full attention: two groups", 8, source, sink,
                      _TWO, windows=(0, 40), backend=_TRITON)
            for source, sink in ((_HND, _HND), (_NHD, _HND), (_BLOCK_HND, _BLOCK_HND))
        ),
        LayoutRow("sliding window beside full attention: two groups", 8, _PAGES, _PAGES,
                  _PLAIN, windows=(0, 40), backend=_CPU),
    )  # fmt: skip


def _refused() -> tuple[LayoutRow, ...]:
    def row(source: CacheMemory, sink: CacheMemory, refusal: str, cache_type: str) -> LayoutRow:
        return LayoutRow("GQA, 8 heads", 8, source, sink, (cache_type,), refusal=refusal)

    return (
        row(_PAGES, _PAGES._replace(block_tokens=32), "block_tokens differs", "float32"),
        row(_PAGES, _PAGES._replace(page_format="cpu-amx"), "page_format differs", "float32"),
        row(_PAGES, _HND, "content differs", "float32"),
        row(_HND, _HND._replace(cache_type="fp8"), "dtype differs", "bfloat16"),
        row(_HND, _HND._replace(cache_type="fp8"), "scale_bytes differs", "fp8_per_token_head"),
    )


ROWS = (*_moving(), *_refused())

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "block_tokens differs": "only whole pages move, because their tokens have no known places",
        "page_format differs": "kernels of another instruction set arrange a page in another way",
        "content differs": "the format of pages is the backend's own",
        "dtype differs": "types are never converted, because that would change the model's results",
        "scale_bytes differs": "scales are neither invented nor dropped",
    }
)


class ConnectorRefusal(NamedTuple):
    """A KV cache that PenstockConnector (the plug-in for vLLM) refuses when vLLM starts.

    cache    description of the cache
    changes  fields of CacheFacts in which it differs from a supported cache
    message  part of the error message
    reason   why the cache is refused
    """

    cache: str
    changes: Mapping[str, object]
    message: str
    reason: str


CONNECTOR_REFUSALS = (
    ConnectorRefusal(
        "`AMX_MLA` and other backends that are not listed",
        {"backend": "AMX_MLA", "latent": True},
        "AMX_MLA is unknown",
        "where the backend puts a token is not known",
    ),
    ConnectorRefusal(
        "`nvfp4`, `int4_per_token_head`, `turboquant_*`",
        {"dtype": "nvfp4"},
        "type nvfp4",
        "several scalars share a byte, and scales lie in places of the backend's own",
    ),
    ConnectorRefusal(
        "`fp8_ds_mla`",
        {"backend": "FLASHMLA", "latent": True, "dtype": "fp8_ds_mla"},
        "type fp8_ds_mla",
        "a packed row of two types and scales is not described",
    ),
    ConnectorRefusal(
        "`fp8_per_token_head` without `TRITON_ATTN`",
        {"dtype": "fp8_per_token_head"},
        "stores its scales",
        "where the backend puts the scales is not known",
    ),
    ConnectorRefusal(
        "`--tensor-parallel-size` that neither divides the heads nor is divided by them",
        {"tp": 3},
        "neither split nor repeated",
        "vLLM has no such cache either",
    ),
)


def layouts_page_rows() -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the table rows of the layouts that can be transferred, and of those that are
    refused.
    """
    moving: list[tuple[str, ...]] = [
        (
            row.cache,
            _memory_text(row.source, row.sink),
            ", ".join(f"`{name}`" for name in row.cache_types),
            *(" ".join(row.proofs(pair)) for pair in row.pairs),
        )
        for row in ROWS
        if not row.refusal
    ]
    refused: list[tuple[str, ...]] = [
        (
            row.cache,
            _memory_text(row.source, row.sink),
            " → ".join(
                f"`{memory.cache_type or row.cache_types[0]}`" for memory in (row.source, row.sink)
            ),
            f"{row.refusal} ({_REASONS[row.refusal]})",
        )
        for row in ROWS
        if row.refusal
    ]
    return moving, refused


_ORDER_NAMES: Mapping[str, str] = MappingProxyType({"lbhnc": "HND", "lbnhc": "NHD"})


def _memory_text(source: CacheMemory, sink: CacheMemory) -> str:
    texts = [_one_memory(source), _one_memory(sink)]
    return " → ".join(texts)


def _one_memory(memory: CacheMemory) -> str:
    name = _ORDER_NAMES.get(memory.order, "")
    order = f"{name} (`{memory.order}`)" if name else f"`{memory.order}`"
    details = [memory.page_format] if memory.page_format else []
    details += [f"blocks of {memory.block_tokens}"] if memory.block_tokens != 16 else []
    return f"{memory.content}, {order}" + "".join(f", {detail}" for detail in details)
