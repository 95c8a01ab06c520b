"""Converts the options of `penstock size` to a model, GPUs and traffic, and checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from planner.size.plan_draft import PlanHardware, SizingError
from planner.size.units import parse_seconds, parse_tokens
from planner.size.workload import Promise, Workload
from policies.sizing.gpus import GPUS, Gpu, gpu_from_members, gpu_named
from policies.sizing.hf_parameter_count import shape_from_config
from policies.sizing.model_shapes import MODELS, Llm, model_named

MAX_FILE_BYTES = 4 << 20
QUANTS = ("auto", "bf16", "fp8")
_SHORT_NAMES = [name for name in MODELS if "/" not in name]


class SizeOptions(msgspec.Struct, frozen=True):
    """The options of `penstock size` as given on the command line.

    smallest_tp  TP sizes below this one are not considered (--tp)
    calibrated   the GPU of --gpu with constants fitted to a log (--calibrate); None: built-in
                 constants
    """

    model: str
    gpu: str
    gpus: int | None
    prompt: str
    output: str
    cached: float
    rate: float | None
    concurrency: float | None
    context: str | None
    ttft: str | None
    tpot: str | None
    percentile: float
    promises: Sequence[str]
    max_concurrency: int | None
    headroom: float
    quant: str
    kv_dtype: str
    domain: int | None
    price: str
    is_best_effort: bool
    smallest_tp: int = 1
    calibrated: Gpu | None = None


def model_of(options: SizeOptions) -> Llm:
    """Return the model's shape, from a built-in name, a config.json file, or its folder.

    Raises SizingError if the name is unknown or the file is invalid.
    """
    text = options.model
    path = Path(text)
    if text and path.is_dir():
        path /= "config.json"
    try:
        if path.suffix == ".json":
            model = shape_from_config(_config(path), path.resolve().parent.name)
        else:
            model = model_named(text)
    except ValueError as error:
        raise SizingError(f"{error}{'' if path.suffix == '.json' else _advice(text)}") from None
    if options.kv_dtype not in ("bf16", "fp8"):
        raise SizingError(f"unknown --kv-dtype {options.kv_dtype!r}; valid: bf16, fp8")
    if options.quant not in QUANTS:
        raise SizingError(f"unknown --quant {options.quant!r}; valid: {', '.join(QUANTS)}")
    return msgspec.structs.replace(model, kv_bytes=1.0 if options.kv_dtype == "fp8" else 2.0)


def _config(path: Path) -> Any:
    # Return the members of a config.json, with the quantisation that ModelOpt writes beside it.
    config, beside = _json(path), path.with_name("hf_quant_config.json")
    if not isinstance(config, dict) or "quantization_config" in config or not beside.exists():
        return config
    quantised = _json(beside)
    section = quantised.get("quantization") if isinstance(quantised, dict) else None
    if not isinstance(section, dict):
        raise SizingError(f"the file {beside} lacks the section quantization")
    return config | {"quantization_config": {"quant_method": "modelopt", **section}}


def _advice(text: str) -> str:
    # Return what to give in place of an unknown model name.
    near = get_close_matches(text.lower().rpartition("/")[2], _SHORT_NAMES, 1, 0.75)
    near_text = f"; the nearest is {near[0]}" if near else ""
    return f"{near_text}; for any other model, give its config.json or the folder that contains it"


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise SizingError(
                f"the file {path} is larger than 4 MiB, the limit for a description of a model "
                "or GPU"
            )
        return json.loads(text)
    except OSError as error:
        raise SizingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise SizingError(f"the file {path} is not valid JSON") from None


def hardware_of(options: SizeOptions) -> list[PlanHardware]:
    """Return the kinds of GPU to plan a fleet for, at least one.

    Raises SizingError if an option is invalid.
    """
    names = [name.strip() for name in options.gpu.split(",") if name.strip()]
    if not names:
        raise SizingError(f"--gpu must not be empty; valid: {', '.join(GPUS)}, or a JSON file")
    if options.gpus is not None and options.gpus < 1:
        raise SizingError(f"--gpus must be at least 1, not {options.gpus}")
    if options.domain is not None and options.domain < 1:
        raise SizingError(f"--domain must be at least 1, not {options.domain}")
    gpus = [options.calibrated] if options.calibrated else list(map(_gpu, names))
    if options.smallest_tp < 1:
        raise SizingError(f"--tp must be at least 1, not {options.smallest_tp}")
    prices = _prices(options.price, [gpu.name for gpu in gpus])
    return [
        PlanHardware(
            gpu,
            options.domain or gpu.domain_gpus,
            options.gpus,
            prices.get(gpu.name, prices.get("", 2.5)),
            options.is_best_effort,
            options.smallest_tp,
        )
        for gpu in gpus
    ]


def _gpu(name: str) -> Gpu:
    try:
        return gpu_from_members(_json(Path(name))) if name.endswith(".json") else gpu_named(name)
    except ValueError as error:
        raise SizingError(str(error)) from None


def _prices(text: str, known: Sequence[str]) -> Mapping[str, float]:
    # Return dollars per GPU and hour by GPU name; the name "" stands for all others.
    #
    # Raises SizingError for a name that is not among `known`.
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0 < price < 1e6:
            raise SizingError(
                f"--price {part!r} is invalid; write a number such as 2.5, or h100=2.5,h200=3.5"
            )
        prices[name.strip().lower()] = price
    if unknown := sorted(prices.keys() - {"", *known}):
        raise SizingError(
            f"--price has a price for {', '.join(unknown)}, but --gpu does not contain it; "
            f"valid: {', '.join(known)}"
        )
    return prices


def workload_of(options: SizeOptions, model: Llm) -> Workload:
    """Return the planned traffic and its promised latencies.

    Raises SizingError if an option is invalid or contradicts another one.
    """
    prompt, output = _tokens("--in", options.prompt), _tokens("--out", options.output)
    context = _tokens("--context", options.context or str(prompt + output))
    if context < prompt + output:
        raise SizingError(
            f"--context must be at least {prompt + output:,} tokens (--in {prompt:,} plus --out "
            f"{output:,}), not {context:,}"
        )
    if context > model.max_context:
        source = f"--context {context:,}" if options.context else f"--in plus --out ({context:,})"
        raise SizingError(f"{source} exceeds the model's maximum of {model.max_context:,} tokens")
    _check_load(options)
    concurrency = options.concurrency
    if concurrency is None and options.rate is None:
        concurrency = 1.0
    return Workload(
        *(prompt, output, context, options.rate, concurrency, options.cached),
        *(options.max_concurrency, options.headroom, promises_of(options)),
    )


def _check_load(options: SizeOptions) -> None:
    if options.rate is not None and options.concurrency is not None:
        raise SizingError("--rate and --concurrency exclude each other; give only one of them")
    limits: tuple[tuple[str, float | None, float, float], ...] = (
        ("--rate", options.rate, 1e-6, 1e6),
        ("--concurrency", options.concurrency, 1, 1e7),
        ("--cached", options.cached, 0, 0.999),
        ("--headroom", options.headroom, 0, 10),
        ("--percentile", options.percentile, 50, 99.99),
        ("--max-concurrency", options.max_concurrency, 1, 1e6),
    )
    for name, value, least, most in limits:
        if value is not None and not least <= value <= most:
            raise SizingError(f"{name} must be from {least:g} to {most:g}, not {value:g}")


def _tokens(name: str, text: str) -> int:
    try:
        return parse_tokens(text)
    except ValueError as error:
        raise SizingError(f"{name}: {error}") from None


def _seconds(name: str, text: str | None) -> float | None:
    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise SizingError(f"{name}: {error}") from None


def promises_of(options: SizeOptions) -> tuple[Promise, ...]:
    """Return the promised latencies by class: of --ttft and --tpot, and of each --promise."""
    promises = [_promise(text, options.percentile) for text in options.promises]
    if options.ttft is not None or options.tpot is not None:
        ttft_s, tpot_s = _seconds("--ttft", options.ttft), _seconds("--tpot", options.tpot)
        promises.insert(0, Promise("standard", ttft_s, tpot_s, options.percentile))
    names = [promise.name for promise in promises]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SizingError(
            f"promises for the class {twice!r} are given twice; give each class once, as "
            "chat:ttft=1s,tpot=40ms,p=99 (--ttft and --tpot are those of the class 'standard')"
        )
    if options.is_best_effort and not promises:
        raise SizingError("--best-effort requires a promised time: --ttft or --tpot")
    return tuple(promises)


def _promise(text: str, percentile: float) -> Promise:
    # Return the promise in a text such as NAME:ttft=1s,tpot=40ms,p=99. Raises SizingError.
    name, _, rest = text.partition(":")
    members = rest.split(",")
    parts = dict(part.split("=", 1) for part in members if "=" in part)
    is_odd = len(parts) < len(members) or bool(parts.keys() - {"ttft", "tpot", "p"})
    if not name or is_odd or not parts.keys() & {"ttft", "tpot"}:
        raise SizingError(
            f"--promise {text!r} is invalid; an example is chat:ttft=1s,tpot=40ms,p=99"
        )
    try:
        kept = float(parts.get("p", percentile))
    except ValueError:
        kept = 0.0
    if not 50 <= kept <= 99.99:
        raise SizingError(
            f"--promise {text!r} is invalid: the percentile p must be from 50 to 99.99"
        )
    ttft_s = _seconds("--promise", parts.get("ttft"))
    return Promise(name, ttft_s, _seconds("--promise", parts.get("tpot")), kept)
