"""Logical workers, which compute one after another in one shared model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.protocol import Assignment, Layout, Push, Report
from fairseq_async.simulation.experiment import OptimizerOptions
from fairseq_async.simulation.problems.problem import Problem
from fairseq_async.simulation.schedule import LearningRate, make_optimizer, set_lr
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.shards import SEEDS, BatchKey, ShardOrder

_OWN_STATE = ("optimizer", "id", "report", "compressor", "streamed")


@dataclass
class StreamedParameters:
    """The parameters and work of a worker that exchanges fragments, between two exchanges.

    Attributes:
        local: the worker's own parameters.
        taken: the parameters that it has taken from the server, each fragment when its turn was.
        assignment: the assignment whose steps it continues until it is answered.
        done: number of steps of the assignment that it has taken.
    """

    local: Tensor
    taken: Tensor
    assignment: Assignment
    done: int

    @property
    def meanwhile(self) -> Assignment:
        """Assignment of the steps after those that were sent: with the next batches, further on in the schedule."""
        moved = self.assignment.progress_per_step * self.done
        offset, progress = self.assignment.offset + self.done, self.assignment.progress + moved
        return replace(self.assignment, offset=offset, progress=progress)

    def state_dict(self) -> State:
        return vars(self) | {"assignment": vars(self.assignment)}

    @classmethod
    def from_state(cls, state: State, device: torch.device) -> "StreamedParameters":
        local, taken = state["local"].to(device), state["taken"].to(device)
        return cls(local, taken, Assignment(**state["assignment"]), state["done"])


@dataclass
class LogicalWorker:
    """One worker's state between two exchanges.

    Attributes:
        delta: the update that it has computed and not yet delivered; the only copy of the model that it keeps where the
            model is exchanged whole.
        optimizer: the inner optimizer, under local SGD.
        incarnation: how often it has come or died.
        steps: number of steps that it has ever taken, lost ones included.
        report: the report that goes with its next update.
        compressor: the compressor of its updates; None where they are sent in fp32.
        streamed: its parameters between two exchanges, where fragments are exchanged.
        number: its number among the workers of all regions.
    """

    id: int
    delta: Tensor
    optimizer: torch.optim.Optimizer | None = None
    incarnation: int = 0
    steps: int = 0
    sequence: int = 0
    base_version: int = 0
    weight: float = 0.0
    sent_at: float = 0.0
    report: Report = field(default_factory=Report)
    compressor: Compressor | None = None
    streamed: StreamedParameters | None = None
    number: int = 0

    def compress(self) -> None:
        """Replaces ``delta`` by what the server will decode from its bytes, and reports their number."""
        if self.compressor is None:
            self.report = replace(self.report, bytes_sent=4 * self.delta.numel())
            return
        push = Push(self.sequence, self.base_version, self.weight, self.report)
        push, payload = self.compressor.encode(push, self.delta)
        self.report = push.report
        if payload is not None:
            self.delta.copy_(self.compressor.decode(payload, self.delta.numel(), push))

    def state_dict(self) -> State:
        kept = {name: value for name, value in vars(self).items() if name not in _OWN_STATE}
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        compressor = None if self.compressor is None else self.compressor.state_dict()
        streamed = None if self.streamed is None else self.streamed.state_dict()
        own = {"report": vars(self.report), "optimizer": optimizer, "compressor": compressor, "streamed": streamed}
        return kept | own

    def load_state_dict(self, state: State) -> None:
        state = dict(state)
        self.report = Report(**state.pop("report"))
        delta, streamed = state.pop("delta"), state.pop("streamed")
        self.delta = delta.to(self.delta.device)  # which may have the size of a fragment
        self.streamed = None if streamed is None else StreamedParameters.from_state(streamed, self.delta.device)
        optimizer, compressor = state.pop("optimizer"), state.pop("compressor")
        if self.compressor is not None:
            self.compressor.load_state_dict(compressor, compressor["sequence"])
        if self.optimizer is not None and optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
        vars(self).update(state)


class SharedModel:
    """The problem's model with its parameters in one flat tensor, on which all workers compute in turn.

    Each step begins with a seed of its own, from worker, update and step: its random numbers, such as those of dropout,
    do not depend on the order in which workers compute.

    Args:
        batch_size: number of samples in a step.
        order: order of the samples.
        bf16: makes the model one of bfloat16, which is rounded from the flat fp32 tensor before each gradient and each
            evaluation, as a real worker's is from the server's parameters. It takes no local steps.
    """

    def __init__(self, problem: Problem, batch_size: int, order: ShardOrder, seed: int, bf16: bool = False) -> None:
        self.problem, self.batch_size, self.order, self.seed = problem, batch_size, order, seed
        if bf16:
            problem.model.bfloat16()
        named = [(name, p) for name, p in problem.model.named_parameters() if p.requires_grad]
        self.layout = Layout.of(named)
        self.parameters = [parameter for _, parameter in named]
        self.flat = torch.empty(self.layout.size, device=self.parameters[0].device)
        for view, parameter in zip(self.layout.views(self.flat), self.parameters, strict=True):
            view.copy_(parameter.detach())
        self._rounded = self.flat.bfloat16() if bf16 else None
        self.live_in(self.flat)

    def live_in(self, flat: Tensor) -> None:
        """Makes the model's parameters views of ``flat`` from now on, without a copy; in bf16 they are rounded from it
        when they are used."""
        self._given = flat
        own = flat if self._rounded is None else self._rounded
        for view, parameter in zip(self.layout.views(own), self.parameters, strict=True):
            parameter.data = view

    def gradient(self, worker: LogicalWorker, batches: Sequence[BatchKey], average: int = 1) -> float:
        """Writes the mean gradient of these batches at the current parameters into ``worker.delta``; returns the loss.

        Args:
            average: number of batches in a worker's step on average. The random numbers of a batch are those of the
                worker whose part has it, whoever computes it.
        """
        self._round()
        summed = worker.delta.zero_() if self._rounded is None else torch.zeros_like(self._rounded)
        for view, parameter in zip(self.layout.views(summed), self.parameters, strict=True):
            parameter.grad = view
        total = worker.weight = 0.0
        for shard, number in batches:
            self._seed(worker.number - worker.id + shard, *divmod(number, average))
            loss, weight = self._loss(shard, number)
            loss = loss if len(batches) == 1 else loss * weight
            loss.backward()
            total, worker.weight = total + float(loss.detach()), worker.weight + weight
        for parameter in self.parameters:
            parameter.grad = None
        if summed is not worker.delta:
            worker.delta.copy_(summed)
        if len(batches) > 1:
            worker.delta.div_(worker.weight)
            total /= worker.weight
        return total

    def local_steps(
        self, worker: LogicalWorker, start: Tensor, assignment: Assignment, rate: LearningRate, clip_norm: float
    ) -> tuple[list[float], float]:
        """Takes the assigned steps from ``start``; ``worker.delta`` becomes θ_start − θ. Returns losses and tokens.

        The model must not live in ``start``.
        """
        assert self._rounded is None, "local steps are in fp32"
        self.flat.copy_(start)
        losses, tokens = self.take_steps(worker, assignment, range(assignment.local_steps), rate, clip_norm)
        torch.sub(start, self.flat, out=worker.delta)
        worker.weight = float(assignment.local_steps)
        return losses, tokens

    def take_steps(
        self, worker: LogicalWorker, assignment: Assignment, steps: range, rate: LearningRate, clip_norm: float
    ) -> tuple[list[float], float]:
        """Takes these steps of an assignment, from the model's current parameters. Returns losses and tokens."""
        assert worker.optimizer is not None
        losses, tokens = [], 0.0
        for step in steps:
            self._seed(worker.number, worker.sequence, step)
            loss, weight = self._loss(assignment.shard or 0, assignment.offset + step)
            worker.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(self.parameters, clip_norm)
            set_lr(worker.optimizer, rate(assignment.progress + assignment.progress_per_step * step))
            worker.optimizer.step()
            losses.append(loss.detach())
            tokens += weight
        return [float(loss) for loss in losses], tokens

    def evaluate(self) -> float:
        self._round()
        return self.problem.evaluate()

    def pretrain(self, options: OptimizerOptions, rate: LearningRate, steps: int) -> float:
        """Trains plainly with one worker on the whole set; returns the mean loss of the last tenth of the steps."""
        alone = LogicalWorker(id=0, delta=torch.empty_like(self.flat))
        alone.optimizer = make_optimizer(options, self.parameters)
        whole = Assignment(local_steps=steps, shard=0)
        losses, _ = self.local_steps(alone, self.flat.clone(), whole, rate, options.clip_norm)
        return fmean(losses[-max(1, steps // 10) :])

    def _round(self) -> None:
        if self._rounded is not None:
            self._rounded.copy_(self._given)

    def _seed(self, worker: int, sequence: int, step: int) -> None:
        torch.manual_seed((((self.seed * 1009 + worker) * 1_000_003 + sequence) * 1009 + step) % SEEDS)

    def _loss(self, shard: int, number: int) -> tuple[Tensor, float]:
        return self.problem.loss(self.problem.batch(self._samples(shard, number)))

    def _samples(self, shard: int, number: int) -> Sequence[int]:
        return self.order.indices(shard, number * self.batch_size, self.batch_size)
