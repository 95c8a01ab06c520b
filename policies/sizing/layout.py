"""How one engine process divides a model over GPUs, and how pipeline stages divide its layers."""

from __future__ import annotations

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """Tensor, pipeline, expert, data and context parallel size of one engine process."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the process. Experts are spread over the ranks of TP and DP, not over more."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def label(self) -> str:
        """The sizes above one, for example `TP 8 x PP 2`; `TP 1` for a single GPU."""
        sizes = (("DP", self.dp), ("EP", self.ep), ("CP", self.cp))
        parts = [f"{name} {size}" for name, size in (("PP", self.pp), *sizes) if size > 1]
        return " x ".join([f"TP {self.tp}", *parts])


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    Remaining layers go to the stages before the last, one each, because the last one has the output
    head too. Source: vLLM's get_pp_indices.
    """
    stages = [layers // pp] * pp
    for place in range(2, layers % pp + 2):
        stages[-place] += 1
    return stages
