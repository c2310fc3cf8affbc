"""The worker side of hybrid asynchronous SGD: pushes gradients, and pulls parameters when they have changed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.missing import missing_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange.devices import ARRIVED, Transfer
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol import Assignment, Push, Report, Welcome
from fairseq_async.protocol.receipt import Status
from fairseq_async.protocol.work import DRAWN
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.divided import DividedReplica
from fairseq_async.worker.replica import TensorReplica, between

MOST_REFUSED = 10  # gradients in a row, before a worker stops


class HybridWorker(AsyncWorker):
    """Pushes mean gradients, and pulls parameters when they have changed.

    Args:
        client: the connection to the server.
        named: the model's parameters with their names.
        zeros: whether a parameter whose ``grad`` is None has the gradient 0, as where an optimizer steps fp32 masters.
            Otherwise the server leaves a parameter alone that no gradient of a step has.
        is_writer: whether this rank writes the gradients into the slot; of an island's ranks, which have the same ones,
            one does.
        divided: the parameters and their gradients, where each rank of an island holds and writes a part of them.

    Attributes:
        shard: this worker's part of the training set, of which it has drawn ``offset`` batches.
        weight: of the gradients of :meth:`step`, where it is not the number of their samples, as that of their tokens.
        empty: how many of the gradient's micro-batches have no sample; ``micro_batches`` is then that of the others.
    """

    def __init__(
        self,
        client: ServerConnection,
        named: Sequence[tuple[str, Parameter]],
        zeros: bool = False,
        is_writer: bool = True,
        divided: DividedReplica | None = None,
    ) -> None:
        super().__init__(client, divided or TensorReplica(named, is_writer), MOST_REFUSED)
        self._divided = divided
        self._zeros, self._is_writer = zeros, is_writer or divided is not None
        self._parameters = [parameter for _, parameter in named]
        self._begun: tuple[int, Transfer] | None = None  # the slot's address, and the gradients on their way there
        self.learning_rate = self._steps = 0.0
        self.weight: float | None = None
        self.empty = 0
        self._partial_steps, self._average = False, 0
        self.last = {"staleness": 0.0, "push_seconds": 0.0, "pull_seconds": 0.0}

    @property
    def shard(self) -> int:
        return self.client.worker % self.client.workers  # a worker that was not announced shares another's shard

    @property
    def offset(self) -> int:
        return self.sequence

    @property
    def progress(self) -> float:
        """The server's steps so far, in whole steps; partial steps are added up."""
        return self._steps if self._partial_steps else float(self.version)

    total_progress = run_progress = progress

    def join(self, spec: MethodSpec) -> Welcome:
        self._partial_steps = spec.closes_early or "parts" in spec.framework  # a version is not a whole step
        self._average = spec.micro_batches
        return super().join(spec)

    def begin(self, welcome: Welcome) -> None:
        """Takes the server's parameters and the learning rate."""
        super().begin(welcome)
        self._note(welcome.assignment)
        if self._average:
            drawn = (welcome.position or {}).get(DRAWN)
            # of one that the run did not have before, as many as of the others on average
            gradients = self.sequence or int(self.progress)
            self.drawn = drawn if isinstance(drawn, int) else gradients * self._average

    def take_state(self, server: State) -> None:
        """Takes parameters and progress from the server's whole state."""
        self.replica.write(server["parameters"])
        self.note_parameters()
        self.version, self._steps = server["version"], server["rule"]["steps"]

    def scale_into_slot(self, factor: float) -> None:
        """Multiplies the parameters' ``grad``, which is fp32 on the CPU, by ``factor``. The products are written into
        the slot, and ``grad`` then refers to the slot, so that the push has nothing to copy."""
        self.client.prepare(partial(self._scale_into, factor))

    def write_ahead(self, factor: float = 1.0) -> None:
        """Begins to write the gradients, times ``factor``, into the slot; the next push waits until they are there.

        A GPU copies while this process measures the gradients. On the CPU this does nothing: copying would take this
        process's own time.
        """
        if self.replica.device.asynchronous and self._is_writer:  # of parts, this process writes and waits
            self.pin_exchanged()
            self.client.prepare(partial(self._begin, factor))

    def written_norm(self) -> Tensor | None:
        """Returns the L2 norm of what :meth:`write_ahead` writes, where that is on a GPU: one kernel measures it there.
        Elsewhere None."""
        slot = self.client.slot
        on_gpu = self._begun is not None and self._divided is None and not slot.is_cpu
        return torch.linalg.vector_norm(slot) if on_gpu else None

    def write(self, slot: Tensor, factor: float = 1.0) -> None:
        """slot ← factor · gradients, for the push; completes a :meth:`write_ahead` with the same factor."""
        if not self._is_writer:
            return
        if self._begun is None or self._begun[0] != slot.data_ptr():  # a server that has come back has another slot
            self._begin(factor, slot)
        assert self._begun is not None
        (_, transfer), self._begun = self._begun, None
        transfer.synchronize()  # the server reads the slot when it has the message

    def step(self, samples: float, loss: float | None, norm: float | None = None, factor: float = 1.0) -> None:
        """Pushes the parameters' ``grad`` times ``factor``, the mean over ``samples``, as :meth:`exchange` does."""
        weight = float(samples) if self.weight is None else self.weight
        position: JsonObject | None = None if self.drawn is None else {DRAWN: self.drawn + self.micro_batches}
        self.exchange(partial(self.write, factor=factor), weight, Report(position, loss=loss), norm)

    def exchange(
        self,
        write: Callable[[Tensor], object],
        weight: float,
        report: Report,
        norm: float | None = None,
    ) -> None:
        """Pushes the gradient that ``write`` puts into the slot, and pulls the parameters if they have changed.

        Args:
            weight: weight of this gradient in the sum of a step's gradients.
            report: values for ``events.jsonl``; the duration of the previous exchange is added to them.
            norm: the gradient's L2 norm where it is known, so that the server need not compute it.

        Raises:
            ConfigurationError: something else than the run has changed parameters.
            RefusedError: the last :data:`MOST_REFUSED` gradients had NaN or Inf, or were outliers.
            ExchangeError: the server is gone; this gradient may be lost.
        """
        self.check_unchanged()
        started = time.perf_counter()
        missing = 0 if self._zeros else missing_of(parameter.grad for parameter in self._parameters)
        self.pin_exchanged()
        timed = replace(
            report,
            push_seconds=self.last["push_seconds"],
            pull_seconds=self.last["pull_seconds"],
            look_ahead=self.look_ahead or None,
            micro_batches=self.micro_batches + self.empty or None,
            offset=self.first_micro_batch,
            missing=f"{missing:x}" if missing else None,
            first_batch=self.batches.take(),
        )
        answer = self.client.push(write, Push(self.sequence, self.version, weight, timed, norm, pulls=True))
        pushed = time.perf_counter()
        self.sequence += 1
        if self.drawn is not None:
            self.drawn += self.micro_batches
        self.finished = answer.finished
        self._note(answer.assignment)
        if answer.version != self.version or self.finished:  # at the end too: the parameters here may be rounded
            self.start(answer.assignment.look_ahead)
        self.last = {
            "staleness": float(answer.staleness),
            "push_seconds": pushed - started,
            "pull_seconds": time.perf_counter() - pushed,
        }
        self.refusals.count(answer.refused, outlier=answer.status is Status.OUTLIER)

    def send_done(self) -> None:
        """Sends nothing, since each gradient is sent when it is computed; checks that nothing would be overwritten."""
        self.check_unchanged()

    def check_unchanged(self, changed: str | None = None) -> None:
        """Checks that the parameters are as this worker took them from the server.

        Args:
            changed: the name of a parameter of which a change is known.

        Raises:
            ConfigurationError: something else than the run has changed parameters.
        """
        if name := changed or self.changed_parameter():
            raise ConfigurationError(
                f"{name} is not as this worker took it from the server: something in this process changes parameters "
                "(clamping, max_norm, a pruning mask, load_state_dict, another optimizer). With hybrid_async the "
                "server's next parameters would overwrite the change: leave it out, or use local SGD, which takes it"
            )

    def _note(self, assignment: Assignment) -> None:
        self.learning_rate, self._steps = assignment.learning_rate or 0.0, assignment.total_progress
        self.micro_batches, self.empty = assignment.micro_batches, 0
        self.first_micro_batch = assignment.first_micro_batch

    def start(self, look_ahead: float = 0.0) -> None:
        """Takes the server's parameters, or parameters ``look_ahead`` versions ahead of them; at the end of the run,
        the server's last ones."""
        if self.finished:
            return self.pull()
        self.version = self.client.pull(self.replica.write, look_ahead, starts=True)
        self.note_parameters()
        self.look_ahead = look_ahead

    def _scale_into(self, factor: float, slot: Tensor) -> None:
        for parameter, room in zip(self._parameters, self.replica.layout.views(slot), strict=True):
            if parameter.grad is not None:
                parameter.grad = torch.mul(parameter.grad, factor, out=room)

    def _begin(self, factor: float, slot: Tensor) -> None:
        if self._divided is not None:
            self._divided.write_gradients(slot, factor)
            self._begun = slot.data_ptr(), ARRIVED
            return
        gradients = map(gradient, self._parameters)
        self._begun = slot.data_ptr(), between(self.replica.device, slot).begin(slot, gradients, factor)


def gradient(parameter: Parameter) -> Tensor:
    """Returns the parameter's ``grad``; where it is None, zeros that take one element of memory."""
    return parameter.new_zeros(()).expand_as(parameter) if parameter.grad is None else parameter.grad
