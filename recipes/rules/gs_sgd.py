"""gs-SGD in the simulator: steps with the largest values of all workers' gradients, found by sketches that add up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import Rule, Update  # noqa: E402
from fairseq_async.algorithms.codecs.payload import header_bytes  # noqa: E402
from fairseq_async.algorithms.rule import State, fills  # noqa: E402
from fairseq_async.simulation.ranks import RanksMethod, TwoRounds, register_ranks_method  # noqa: E402
from recipes.rules.count_sketch import CountSketch  # noqa: E402


class GsSGDOptions(BaseModel):
    """The keys of ``method: gs_sgd`` in an experiment.

    Attributes:
        rows: number of rows of a sketch.
        columns: number of columns of a sketch.
        keep: k, the number of values in a step.
        candidates: p; p·k values are asked for in the second round.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["gs_sgd"]
    rows: int = Field(5, ge=1, le=64)
    columns: int = Field(ge=1, le=1 << 31)
    keep: int = Field(ge=1)
    candidates: int = Field(4, ge=1)


class GsSGD(Rule):
    """Synchronous SGD with the k largest values of the workers' summed gradients; after the abstract of gs-SGD.

    ::

        e_w = residual_w + g_w                              on each worker
        S = Σ sketch(e_w)                                   first round
        C = the p·k places with the largest |estimates| of S
        Σ e_w[C], exactly                                   second round
        Δ = the k places of C with the largest |sums|
        step with Σ e_w[Δ] / workers;  residual_w = e_w, with 0 at Δ

    The only momentum is that of the optimizer that steps; the abstract's own momentum, which each worker would keep, is
    left out. All workers count alike, whatever their weights. The workers' residuals are kept in this rule: a simulated
    worker that dies does not lose its residual.

    Args:
        rule: the rule that takes the mean of a round as one gradient.
        workers: number of workers in a round.
        sketch: the sketch that all workers have in common.
        keep: k.
        candidates: p.
    """

    def __init__(self, rule: Rule, workers: int, sketch: CountSketch, keep: int, candidates: int) -> None:
        self.rule, self.workers, self.sketch = rule, workers, sketch
        self.keep, self.candidates = keep, candidates
        self._carried: dict[int, Tensor] = {}
        self._round: list[int] = []

    def bytes_of(self, size: int) -> TwoRounds:
        """Returns the bytes of an update of so many values: places are u32, values fp32."""
        asked = header_bytes(1) + 4 * min(self.keep * self.candidates, size)
        return TwoRounds(self.sketch.most_bytes([size]), asked, asked)

    def apply(self, parameters: Tensor, update: Update) -> float:
        carried = self._carried.setdefault(update.worker, torch.zeros_like(update.delta))
        carried.add_(update.delta)
        self._round.append(update.worker)
        if len(self._round) < self.workers:
            return 0.0
        mean = self._mean_of_largest([self._carried[worker] for worker in self._round])
        self._round = []
        return self.rule.apply(parameters, replace(update, weight=1.0, delta=mean))

    def _mean_of_largest(self, carried: Sequence[Tensor]) -> Tensor:
        size = carried[0].numel()
        sketches = [self.sketch.encode(vector) for vector in carried]
        estimates = self.sketch.decode(reduce(self.sketch.add, sketches), size).to(carried[0])
        asked = estimates.abs().topk(min(self.keep * self.candidates, size)).indices
        sums = torch.stack([vector[asked] for vector in carried]).sum(0)
        chosen = sums.abs().topk(min(self.keep, asked.numel())).indices
        mean = torch.zeros_like(carried[0])
        mean[asked[chosen]] = sums[chosen] / len(carried)
        for vector in carried:
            vector[asked[chosen]] = 0.0
        return mean

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(len(self._round), self.workers, ahead)

    def state_dict(self) -> State:
        return {"rule": self.rule.state_dict(), "carried": self._carried, "round": self._round}

    def load_state_dict(self, state: State) -> None:
        self.rule.load_state_dict(state["rule"])
        self._carried = {worker: vector.clone() for worker, vector in state["carried"].items()}
        self._round = list(state["round"])


def build(options: GsSGDOptions, rule: Rule, workers: int, seed: int, size: int) -> tuple[GsSGD, TwoRounds]:
    """Builds the rule, and says the bytes of an update; ``rule`` takes the mean of a round as one gradient."""
    sketch = CountSketch(options.rows, options.columns, seed)
    largest = GsSGD(rule, workers, sketch, options.keep, options.candidates)
    return largest, largest.bytes_of(size)


register_ranks_method(RanksMethod("gs_sgd", GsSGDOptions, build))
