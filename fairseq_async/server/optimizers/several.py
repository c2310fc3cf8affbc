"""Several optimizers in one server, each for some of the model's tensors."""

from collections.abc import Sequence

from torch import Tensor

from fairseq_async.algorithms import Update
from fairseq_async.algorithms.rule import CompoundRule, State, fills
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule, check_parts


class SeveralOptimizers(CompoundRule):
    """Steps several optimizers, each by the mean of those gradients that have some of its tensors.

    A worker sends the gradients of one optimizer at a time; the tensors of the others are missing in that update, and
    it does not count in their means. When the round is complete, every optimizer steps of which there is a gradient.

    Args:
        rules: of each optimizer: its accumulation with its schedule.
        tensors: of each optimizer: its tensors, as bits (:mod:`~fairseq_async.algorithms.missing`).
        updates_per_step: number of updates in a round, of whichever optimizers.
    """

    rules: Sequence[ScheduledRule]

    def __init__(self, rules: Sequence[ScheduledRule], tensors: Sequence[int], updates_per_step: int) -> None:
        self.rules, self._tensors = rules, tensors
        self.updates_per_step = self._whole_step = updates_per_step
        self.count = 0

    @property
    def steps(self) -> float:
        """Number of complete rounds of steps: that of the optimizer with the fewest steps."""
        return min(rule.steps for rule in self.rules)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first optimizer."""
        return self.rules[0].learning_rate

    def begin_epoch(self, epoch: int) -> None:
        """Tells every schedule that worker 0 begins an epoch."""
        for rule in self.rules:
            rule.begin_epoch(epoch)

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Tells every schedule that worker 0 has ended an epoch, with this validation loss."""
        for rule in self.rules:
            rule.end_epoch(epoch, loss)

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Adds a gradient to the means of the optimizers that have its tensors; the last one of a round lets these
        step."""
        steps = self.moves_parameters()
        for rule, tensors in zip(self.rules, self._tensors, strict=True):
            if tensors & ~update.missing:
                rule.add(parameters, update)
        self.count = 0 if steps else self.count + 1
        for rule in self.rules if steps else ():
            if rule.count:
                rule.close()
        return steps

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(self.count, self.updates_per_step, ahead)

    def limit_round(self, updates: int) -> None:
        """See :meth:`HybridAccumulation.limit_round`."""
        partial = self.rules[0].partial_steps
        self.updates_per_step = updates if partial else min(self._whole_step, updates)

    def state_dict(self) -> State:
        """Returns the state of each optimizer, and how many gradients wait for the end of the round."""
        return {"parts": [rule.state_dict() for rule in self.rules], "count": self.count, "steps": self.steps}

    def load_state_dict(self, state: State) -> None:
        check_parts(state, len(self.rules))
        for rule, own in zip(self.rules, state["parts"], strict=True):
            rule.load_state_dict(own)
        self.count = state["count"]
