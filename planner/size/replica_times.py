"""Computes how fast one replica (engine) is in any layout: prefill, decode steps, and batches.

TP follows the mock engine's step-time model, which is exact at measured points. The other axes
change it: a pipeline stage has a part of the layers, a rank has a part of the experts, and tokens
are sent between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mockgpu.timing.layout_times import rank_model, travel_s
from mockgpu.timing.roofline import StepTimeParts, StepWork
from mockgpu.timing.step_time_grids import Grid, grid_for, roofline_for
from planner.size.workload import Workload
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout
from policies.sizing.token_cost import RequestSeconds


class ReplicaTimes:
    """The step times of one replica (engine) in seconds, cached by their arguments."""

    def __init__(self, model: Llm, gpu: Gpu, layout: Layout, grids: Sequence[Grid]) -> None:
        self.model, self.gpu, self.layout = model, gpu, layout
        self._line = roofline_for(rank_model(model, layout), gpu, layout.tp, grids=grids)
        self.is_measured = grid_for(model, gpu, layout.tp, grids) is not None and (
            layout.pp == layout.dp == layout.ep == layout.cp == 1
        )
        self._decode: dict[tuple[int, int], float] = {}
        self._prefill: dict[tuple[int, int], float] = {}

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds until the first token of a prompt, if the replica has no other work.

        tokens  prompt tokens to compute
        cached  prompt tokens before them that are cached
        """
        key = tokens, cached
        if key not in self._prefill:
            area = tokens * (cached + tokens / 2)
            step_s = self._line.step_s(StepWork(tokens, area)) / self.layout.cp
            self._prefill[key] = step_s + travel_s(self.model, self.gpu, self.layout, tokens)
        return self._prefill[key]

    def decode_s(self, batch: int, context: int) -> float:
        """Return the seconds per token of each of `batch` sequences of `context` tokens.

        Each data-parallel rank has a part of the batch. Each pipeline stage works on one part at a
        time.
        """
        key = batch, context
        if key not in self._decode:
            seqs = -(-batch // (self.layout.dp * self.layout.pp))
            kept = round(seqs * self.model.read_tokens(context))
            step_s = self._line.step_s(StepWork(0, 0.0, seqs, kept))
            self._decode[key] = step_s + travel_s(self.model, self.gpu, self.layout, seqs)
        return self._decode[key]

    def bubble_s(self, tokens: int) -> float:
        """Return the seconds of a prefill in which pipeline stages wait (the pipeline bubble).

        This is the time of pp - 1 stages. `tokens` is the number of prompt tokens.
        """
        return self.prefill_s(tokens) * (self.layout.pp - 1) / self.layout.pp

    def parts(self, batch: int, context: int) -> StepTimeParts:
        """Return the parts of a decode step's time: weights, KV, compute and collectives."""
        seqs = -(-batch // (self.layout.dp * self.layout.pp))
        kept = round(seqs * self.model.read_tokens(context))
        return self._line.terms(StepWork(0, 0.0, seqs, kept))

    def ideal_s(self) -> float:
        """Return the seconds to read all active weights once, at the peak bandwidth of all
        ranks.
        """
        read = self.model.active_params * self.model.param_bytes
        return read / (self.layout.tp * self.gpu.hbm_bytes_s)


class BatchTimes(msgspec.Struct, frozen=True):
    """The times of a replica that always has a full batch.

    batch       number of requests in the batch
    ttft_s      seconds of a request's prefill, without a wait for others
    step_s      seconds of a decode step
    tpot_s      seconds per token, including interruptions by prefills of other requests
    requests_s  completed requests per second
    tokens_s    generated tokens per second
    seconds     the engine seconds of one request
    """

    batch: int
    ttft_s: float
    step_s: float
    tpot_s: float
    requests_s: float
    tokens_s: float
    seconds: RequestSeconds


def at_batch(times: ReplicaTimes, work: Workload, batch: int) -> BatchTimes:
    """Return the estimated times of a replica that always has `batch` requests.

    The batch repeats a cycle: its prefills, then the steps of one answer. Each request waits for
    the prefills of others. Prefills of a pipeline overlap, one in each stage; ranks of DP prefill
    at the same time.
    """
    lanes = times.layout.pp * times.layout.dp
    ttft_s = times.prefill_s(work.uncached, work.cached)
    step_s = times.decode_s(batch, work.mean_context)
    in_lane = max(1.0, batch / lanes)
    others = in_lane - 1
    cycle_s = in_lane * ttft_s + work.output * step_s
    alone_s = times.prefill_s(work.uncached)
    return BatchTimes(
        batch=batch,
        ttft_s=ttft_s,
        step_s=step_s,
        tpot_s=step_s + others * ttft_s / work.output,
        requests_s=batch / cycle_s,
        tokens_s=batch * work.output / cycle_s,
        seconds=RequestSeconds(
            *(work.uncached, work.cached, work.output, alone_s * in_lane / batch),
            *((ttft_s - alone_s) * in_lane / batch, work.output * step_s / batch),
        ),
    )


def largest_batch(times: ReplicaTimes, work: Workload, limit: int, tpot_s: float | None) -> int:
    """Return the largest batch size up to `limit` at which a token takes at most `tpot_s` seconds.

    Returns 0 if there is none.
    """
    if limit < 1 or tpot_s is None or at_batch(times, work, limit).tpot_s <= tpot_s:
        return max(0, limit)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if at_batch(times, work, middle).tpot_s <= tpot_s:
            low = middle
        else:
            high = middle
    return low
