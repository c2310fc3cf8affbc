"""What the first worker says of the run, and every other must say too."""

from dataclasses import dataclass

from fairseq_async.errors import RefusedError
from fairseq_async.exchange import SharedMemory
from fairseq_async.server.layout import Layout
from fairseq_async.server.plan import Message


@dataclass(frozen=True)
class Terms:
    """The model and the method of a run, and the memory in which its workers exchange.

    Args:
        layout: the model's.
        method: a description that JSON can hold.
        memory: with a slot for each worker.
    """

    layout: Layout
    method: Message
    memory: SharedMemory

    @property
    def publishes(self) -> bool:
        """Whether there is a copy of the parameters that workers read when they like; else they ask for them."""
        return _publishes(self.method)

    def check(self, name: str, layout: Layout, method: Message) -> None:
        """Raises a RefusedError for a worker that trains something else."""
        if difference := layout.difference(self.layout):
            raise RefusedError(f"{name} has another model than the others: {difference}")
        if different := [key for key in self.method if self.method[key] != method.get(key)]:
            raise RefusedError(f"{name} was started with another {different[0]} than the others")


def agree(layout: Layout, method: Message, slots: int) -> Terms:
    """The terms of a new run, with memory for so many workers."""
    return Terms(layout, method, SharedMemory.create(layout.size, slots, _publishes(method)))


def _publishes(method: Message) -> bool:
    return bool(method.get("publishes", True))
