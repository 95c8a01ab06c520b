"""Prints how many bytes vLLM allocates for the weights and the KV cache of a model, as JSON.

Run `memory_probe.py TP KV_BYTES "FOLDER OPTION..."...` with the Python interpreter of the engines:

TP        number of tensor-parallel processes (ranks)
KV_BYTES  memory for the KV cache of each rank, in bytes
FOLDER    folder with the model's config.json
OPTION    options of vLLM for this model

Models of any size can be measured: vLLM builds them on torch's meta device. Their tensors have a
shape and a type, but occupy no memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.multiprocessing
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, update_kv_cache_capacity
from vllm.v1.kv_cache_interface import KVCacheSpec

LAYOUT = "LBHNC"  # any: a layout orders the bytes, and does not change their number


def engine_config(folder: str, tp: int, options: Iterable[str]) -> VllmConfig:
    """Return the configuration that vLLM creates for a model's folder and command-line options."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", folder, "--tensor-parallel-size", str(tp), "--load-format", "dummy"]
    flags = [*common, "--skip-tokenizer-init", "--enforce-eager", *options]
    return EngineArgs.from_cli_args(parser.parse_args(flags)).create_engine_config()


def measure(rank: int, tp: int, kv_bytes: int, jobs: list[list[str]]) -> None:
    """Print the bytes that the weights and the KV cache of each model take on one rank.

    The rank loads its part of each model. Rank 0 prints one line of JSON per model. If vLLM rejects
    a model, the line has its error.

    jobs  folder and options of each model
    """
    os.environ["VLLM_DIST_IDENT"] = "probe"  # names the ranks' shared memory, as an engine does
    for folder, *options in jobs:
        try:
            figures = _figures_of(rank, tp, kv_bytes, engine_config(folder, tp, options))
        except Exception as error:  # another model may be measured
            figures = {"error": f"{type(error).__name__}: {error}"[:300]}
        if rank == 0:
            sys.stdout.write(json.dumps({"model": folder, **figures}) + "\n")
            sys.stdout.flush()


def _figures_of(rank: int, tp: int, kv_bytes: int, config: VllmConfig) -> dict[str, Any]:
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            method = f"tcp://127.0.0.1:{os.environ['PROBE_PORT']}"
            init_distributed_environment(tp, rank, method, rank, "gloo")
        destroy_model_parallel()  # the next model may have experts, which have a group too
        initialize_model_parallel(tp)
        return _measured(config, tp, kv_bytes)


def _measured(config: VllmConfig, tp: int, kv_bytes: int) -> dict[str, Any]:
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(config)
    mine = sum(each.numel() * each.element_size() for each in model.parameters())
    ranks = [mine] * tp
    if tp > 1:
        torch.distributed.all_gather_object(ranks, mine)
    config.cache_config.kv_cache_layout = LAYOUT
    default_block_tokens = config.cache_config.block_size
    # A block holds the state of a layer, too; the engine chooses its size once it has the layers.
    current_platform.update_block_size_for_backend(config)
    specs = _specs(config)
    cache = get_kv_cache_configs(config, [specs] * tp, [kv_bytes] * tp)[0]
    update_kv_cache_capacity(config, cache)
    figures = _figures(config, specs, cache.num_blocks, ranks)
    return figures | {"default_block_tokens": default_block_tokens}


def _specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    found = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(config)):
            found[name] = spec
    return found


def _figures(
    config: VllmConfig, specs: dict[str, KVCacheSpec], blocks: int, ranks: list[Any]
) -> dict[str, Any]:
    return {
        "weights_bytes": ranks,
        "layers": [
            {
                "kind": type(spec).__name__,
                "block_tokens": spec.block_size,
                "block_bytes": spec.page_size_bytes,
            }
            for spec in specs.values()
        ],
        "blocks": blocks,
        "context": config.model_config.max_model_len,
        "in_flight_tokens": config.max_in_flight_tokens,
        "kv_cache_size_tokens": config.cache_config.kv_cache_size_tokens,
    }


def main() -> None:
    tp, kv_bytes, *rest = sys.argv[1:]
    jobs = [job.split() for job in rest]
    torch.multiprocessing.spawn(measure, (int(tp), int(kv_bytes), jobs), nprocs=int(tp), join=True)


if __name__ == "__main__":
    main()
