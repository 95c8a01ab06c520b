"""Writes the files and commands that start the engines and the gateway of a sizing plan.

These are engine commands, gateway.yaml, Helm values, and a command for mock engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from planner.size.plan_draft import FleetPlan, SizingError
from policies.sizing.launch_commands import (
    EngineLaunch,
    sglang_command,
    trtllm_options,
    vllm_command,
)
from policies.sizing.model_shapes import MODELS
from policies.sizing.parallel_layout import Layout

POOL = "main"
"""Name of the pool in a generated gateway.yaml."""

# Latency budgets of a service class for which only the other one was promised. They are so long
# that every request should keep them.
LOOSE_TTFT_S, LOOSE_TPOT_S = 60.0, 0.5


# Experts on this many ranks or more are balanced: the busiest rank sets the time of every step.
WIDE_RANKS = 8
# With more ranks than this they are on several nodes, where the engines' default exchange is slow.
NODE_RANKS = 8
AMD = "mi"  # DeepEP runs on NVIDIA's GPUs only


class Emission(msgspec.Struct, frozen=True):
    """A sizing plan, with the names to use in the files and commands that are written for it.

    source         the model's repository or folder, from which the engines load it
    name           the model name that engines serve and clients send
    is_quantising  whether engines quantise bf16 weights when they load them
    first_port     port of the first engine on 127.0.0.1; the other engines use the following ports
    """

    plan: FleetPlan
    source: str
    name: str
    is_quantising: bool = False
    first_port: int = 9000

    def launch(self, all_to_all: str | None = None) -> EngineLaunch:
        """Return the settings with which an engine of the plan is launched.

        all_to_all  the engine's name for the backend that connects experts on several nodes
        """
        plan = self.plan
        ranks = plan.layout.ep
        if plan.hardware.gpu.name.startswith(AMD):
            all_to_all = None
        return EngineLaunch(
            self.source,
            plan.layout,
            served_name=self.name,
            quantization="fp8" if self.is_quantising else None,
            kv_dtype="fp8" if plan.model.kv_bytes == 1 else None,
            max_model_len=plan.work.context,
            max_num_seqs=plan.ceiling,
            all_to_all=all_to_all if ranks > NODE_RANKS else None,
            has_eplb=ranks >= WIDE_RANKS,
        )


def _vllm(emission: Emission) -> str:
    return vllm_command(emission.launch("deepep_low_latency"))


def _sglang(emission: Emission) -> str:
    return sglang_command(emission.launch("deepep"))


def _trtllm(emission: Emission) -> str:
    head = f"# trtllm-serve {emission.source} --extra_llm_api_options this.yaml\n"
    if emission.is_quantising:
        head = (
            "# The plan has fp8 weights. TensorRT-LLM loads them from a checkpoint that ModelOpt\n"
            f"# has quantised: replace {emission.source} by one.\n{head}"
        )
    return head + trtllm_options(emission.launch())


def _gateway(emission: Emission) -> str:
    urls = [
        f"http://127.0.0.1:{emission.first_port + index}" for index in range(emission.plan.replicas)
    ]
    return "\n".join(["version: 1", *_config(emission, urls), ""])


def _helm(emission: Emission) -> str:
    urls = [f"http://engine-{index}.engine:8000" for index in range(emission.plan.replicas)]
    lines = [f"  {line}" for line in _config(emission, urls)]
    return "\n".join(["config:", *lines, ""])


def _config(emission: Emission, urls: list[str]) -> Iterator[str]:
    plan = emission.plan
    gpus = plan.gpus if plan.hardware.gpus is None else max(plan.gpus, plan.hardware.gpus)
    yield f"hardware: {{gpus: {gpus}, link_domain_gpus: {plan.hardware.domain}}}"
    yield "models:"
    yield f"  - {{name: {emission.name}, pool: {POOL}, context_tokens: {plan.work.context}}}"
    yield "pools:"
    yield f"  {POOL}:"
    yield "    endpoints:"
    for index, url in enumerate(urls):
        yield f"      - url: {url}"
        yield f"        name: group-{index}"
        yield f"        layout: {_flow(plan.layout)}"
        yield f"        labels: {{gpu: {plan.hardware.gpu.name}}}"
        yield f"        max_concurrency: {plan.ceiling}"
        yield f"        kv_tokens: {plan.memory.tokens}"
    yield from _classes(emission)


def _flow(layout: Layout) -> str:
    sizes = (("pp", layout.pp), ("ep", layout.ep), ("dp", layout.dp))
    parts = [f"tp: {layout.tp}", *(f"{name}: {size}" for name, size in sizes if size > 1)]
    return f"{{{', '.join(parts)}}}"


def _classes(emission: Emission) -> Iterator[str]:
    promises = emission.plan.work.promises
    if not promises:
        return
    yield "slo:"
    yield f"  default: {promises[0].name}"
    yield "  classes:"
    for promise in promises:
        ttft, tpot = promise.ttft_s or LOOSE_TTFT_S, promise.tpot_s or LOOSE_TPOT_S
        yield f"    {promise.name}: {{ttft: {ttft * 1000:g}ms, tpot: {tpot * 1000:g}ms}}"


def _mock(emission: Emission) -> str:
    plan = emission.plan
    if emission.name.lower() not in MODELS:
        raise SizingError(
            f"mock engines need a built-in model, but the plan is for {emission.name}; built-in "
            f"models: {', '.join(sorted(MODELS))}"
        )
    layout = plan.layout
    sizes = (("pp", layout.pp), ("ep", layout.ep), ("dp", layout.dp), ("cp", layout.cp))
    wide = "".join(f" --{name} {size}" for name, size in sizes if size > 1)
    return (
        f"penstock mock --groups {plan.replicas} --port {emission.first_port} "
        f"--model {emission.name} --gpu {plan.hardware.gpu.name} --tp {layout.tp}{wide} "
        f"--max-num-seqs {plan.ceiling} --kv-tokens {plan.memory.tokens}\n"
    )


EMITTERS: Mapping[str, Callable[[Emission], str]] = MappingProxyType(
    {
        "vllm": _vllm,
        "sglang": _sglang,
        "trtllm": _trtllm,
        "gateway": _gateway,
        "helm": _helm,
        "mock": _mock,
    }
)


def emit(target: str, emission: Emission) -> str:
    """Return the file or command named `target` as text.

    Raises SizingError if the name is unknown.
    """
    emitter = EMITTERS.get(target)
    if emitter is None:
        raise SizingError(f"unknown --emit {target!r}; valid: {', '.join(EMITTERS)}")
    return emitter(emission)
