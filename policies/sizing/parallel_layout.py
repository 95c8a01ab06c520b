"""The parallel layout of an engine over GPUs, and the layers of its pipeline stages."""

from __future__ import annotations

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """The parallel sizes of one engine.

    tp  tensor-parallel size: GPUs among which each layer is divided
    pp  pipeline-parallel size: stages among which the layers are divided
    ep  expert-parallel size: ranks over which the experts are spread
    dp  data-parallel size: ranks that each have requests of their own
    cp  context-parallel size: ranks among which one prompt is divided
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the engine.

        Expert parallelism needs no more GPUs: experts are spread over the ranks of TP and DP.
        """
        return self.tp * self.pp * self.dp * self.cp

    @property
    def label(self) -> str:
        """Return the parallel sizes above one as text, for example `TP 8 x PP 2`.

        The result is `TP 1` for a single GPU.
        """
        sizes = (("DP", self.dp), ("EP", self.ep), ("CP", self.cp))
        parts = [f"{name} {size}" for name, size in (("PP", self.pp), *sizes) if size > 1]
        return " x ".join([f"TP {self.tp}", *parts])


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    If the layers do not divide evenly, the stages just before the last one get one more layer each.
    The last stage has the output head instead. Source: vLLM's get_pp_indices.
    """
    stages = [layers // pp] * pp
    for place in range(2, layers % pp + 2):
        stages[-place] += 1
    return stages
