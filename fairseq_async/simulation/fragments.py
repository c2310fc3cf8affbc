"""The work of a simulated worker between two exchanges of fragments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.options.fragments import FragmentOptions
from fairseq_async.protocol import Assignment
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.simulation.experiment import Method
from fairseq_async.simulation.schedule import LearningRate
from fairseq_async.simulation.workers import LogicalWorker, SharedModel, StreamedParameters


@dataclass(frozen=True)
class FragmentedWork:
    """Computes the updates of workers that exchange fragments; see :mod:`fairseq_async.algorithms.fragments`.

    Args:
        fragment_delay: τ, local steps that a worker takes while a fragment is exchanged.
        rate: learning rate of the inner optimizer.
    """

    fragments: tuple[Fragment, ...]
    fragment_delay: int
    model: SharedModel
    rate: LearningRate
    clip_norm: float

    def meanwhile(self, worker: LogicalWorker) -> int:
        """Returns the number of steps that the worker takes before it has the answer to its last update."""
        return 0 if worker.streamed is None else self.fragment_delay

    def pulled(self, worker: LogicalWorker) -> int:
        """Returns the number of parameters that come with this answer."""
        return self.model.layout.size if worker.streamed is None else self._answered(worker).size

    def _answered(self, worker: LogicalWorker) -> Fragment:
        return in_turn(self.fragments, worker.sequence - 1)

    def compute(
        self, worker: LogicalWorker, assignment: Assignment, server: ParameterServer, given: Tensor | None
    ) -> tuple[int, float, float]:
        """Takes the steps until the next exchange; ``worker.delta`` becomes the update of the fragment whose turn it
        is. Returns steps, mean loss and tokens.

        Args:
            given: the parameters, or the fragment, that the worker takes, where they come compressed; otherwise None.
        """
        meanwhile = self.meanwhile(worker)
        steps = max(meanwhile, assignment.local_steps)
        flat, losses, tokens = self.model.flat, list[float](), 0.0
        if worker.streamed is None:
            taken = torch.empty_like(flat).copy_(server.dispatch() if given is None else given)
            flat.copy_(taken)
        else:
            taken = worker.streamed.taken
            flat.copy_(worker.streamed.local)
            losses, tokens = self._steps(worker, worker.streamed.meanwhile, range(meanwhile))
            fragment = self._answered(worker)
            came = server.dispatch_fragment(worker.sequence - 1) if given is None else given
            fragment.of(taken).copy_(came)
            fragment.of(flat).sub_(fragment.of(worker.streamed.local)).add_(fragment.of(taken))
        more, more_tokens = self._steps(worker, assignment, range(meanwhile, steps))
        following = in_turn(self.fragments, worker.sequence)
        worker.delta = following.of(taken) - following.of(flat)
        worker.weight = float(steps)
        worker.streamed = StreamedParameters(flat.clone(), taken, assignment, steps)
        return steps, sum(losses + more) / steps, tokens + more_tokens

    def _steps(self, worker: LogicalWorker, assignment: Assignment, steps: range) -> tuple[list[float], float]:
        return self.model.take_steps(worker, assignment, steps, self.rate, self.clip_norm)


def fragmented_work(method: Method, model: SharedModel, rate: LearningRate) -> FragmentedWork | None:
    """Returns the work of a method's workers; None where they exchange the whole model, and wait for it."""
    options = method.options
    if not (isinstance(options, FragmentOptions) and options.in_fragments):
        return None
    fragments = model.layout.fragments(options.fragments)
    return FragmentedWork(fragments, options.fragment_delay, model, rate, method.optimizer.clip_norm)
