"""A model's buffers, such as batch normalisation's statistics, beside the parameters that an outer rule changes."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import ComparingRule, CompoundRule, Rule, State, Update, cosine_of


class WorkerBuffers(CompoundRule, ComparingRule):
    """Lets an outer rule change the parameters θ, and takes the buffers b behind them from the workers.

    A worker sends a buffer's value as δ = 0 − b. Differences, added up from several starts, could make a variance
    negative, and would not give a value back to the bit. ::

        "average":   b ← mean of the last k values, in float64
        "worker 0":  b ← the value of worker 0's last update

    k is the number of updates in a round, and the number of workers where there are no rounds. The outer rule sees
    neither buffers nor their δ: momentum, norms and cosines are those of the parameters.

    Args:
        rule: the outer rule, for a model of the parameters alone.
        parameters: number of elements of θ; the buffers are the elements behind them.
        workers: number of workers that were announced.
        average: whether to take the average, and not worker 0's values.
    """

    def __init__(self, rule: Rule, parameters: int, workers: int, average: bool) -> None:
        self.rule, self.rules, self.average = rule, (rule,), average
        self._parameters, self._round = parameters, workers
        self._values: list[Tensor] = []

    def store_buffers(self, parameters: Tensor, update: Update) -> None:
        """Takes the buffers of an update that is about to be applied, before staleness weighs its differences."""
        if not (self.average or update.worker == 0):
            return
        self._values = [*self._values, -update.delta[self._parameters :]][-self._round if self.average else -1 :]
        parameters[self._parameters :].copy_(torch.stack(self._values).double().mean(0))

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies the update of the parameters, by the outer rule."""
        return self.rule.apply(self._of_parameters(parameters), self._without_buffers(update))

    def moves_parameters(self, ahead: int = 0) -> bool:
        return self.rule.moves_parameters(ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        own = self._of_parameters(parameters)
        start = self.rule.dispatch(own)
        return parameters if start is own else torch.cat((start, parameters[self._parameters :]))

    def limit_round(self, updates: int) -> None:
        self._round = updates
        super().limit_round(updates)

    def norm(self, update: Update) -> float:
        finite = bool(torch.isfinite(update.delta[self._parameters :]).all())
        return float(torch.linalg.vector_norm(self._of_parameters(update.delta))) if finite else math.nan

    def cosine(self, update: Update, norm: float) -> float:
        return cosine_of(self._of_parameters(update.delta), norm, self.rule.momentum_buffer)

    def state_dict(self) -> State:
        """Returns the outer rule's state, and the values whose mean the buffers are."""
        return {"rule": self.rule.state_dict(), "values": self._values}

    def load_state_dict(self, state: State) -> None:
        self.rule.load_state_dict(state["rule"])
        self._values = list(state["values"])

    def _of_parameters(self, flat: Tensor) -> Tensor:
        return flat[: self._parameters]

    def _without_buffers(self, update: Update) -> Update:
        return replace(update, delta=self._of_parameters(update.delta))
