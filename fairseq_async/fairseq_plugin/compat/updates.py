"""fairseq's count of updates and its learning-rate schedule, for runs in which the server counts and schedules.

fairseq saves, validates, logs and ends by its trainer's ``num_updates``, and steps a schedule of its own by it.
"""

from typing import Literal

from fairseq.optim.lr_scheduler import FairseqLRScheduler
from torch import Tensor


class AppliedUpdates(int):
    """fairseq's ``num_updates`` in a run in which other workers move it, too: it may stay where it is, or jump.

    fairseq saves, validates and logs when ``num_updates % interval`` is 0, on the assumption that the number grows by
    one. Here that remainder is 0 exactly when a multiple of the interval was reached or passed since ``previous``.

    A checkpoint must hold ``int`` of it: ``torch.load`` does not trust a type of ours.
    """

    previous: int

    def __new__(cls, value: int, previous: int) -> "AppliedUpdates":
        self = super().__new__(cls, value)
        self.previous = previous
        return self

    def __mod__(self, interval: int) -> int:
        if int(self) // interval > self.previous // interval:
            return 0
        return int(self) % interval or interval


class RemoteSchedule(FairseqLRScheduler):
    """The worker side of a learning-rate schedule that runs beside the optimizer in the server.

    The schedule in the server follows the applied updates by itself. Worker 0, which validates, reports its epochs.
    """

    def _report(self, event: Literal["begin_epoch", "end_epoch"], epoch: int, loss: float | None = None) -> None:
        worker = self.optimizer.worker
        if worker.joined and worker.client.worker == 0:
            answer = worker.client.schedule_event(event, epoch, loss)
            self.optimizer.take_rate(answer.learning_rate)

    def step_begin_epoch(self, epoch: int) -> None:
        """Reports that an epoch begins."""
        self._report("begin_epoch", epoch)

    def step(self, epoch: int, val_loss: float | Tensor | None = None) -> None:
        """Reports an epoch's end, with the validation loss."""
        self._report("end_epoch", epoch, None if val_loss is None else float(val_loss))

    def step_update(self, num_updates: int) -> float:
        """Returns the learning rate that the server gave last."""
        return float(self.optimizer.get_lr())
