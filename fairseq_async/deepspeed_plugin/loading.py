"""How DeepSpeed's configuration has the training data read."""

from dataclasses import dataclass
from typing import Any

from fairseq_async.errors import ConfigurationError

_KEYS = '"data_efficiency": "data_sampling"'


@dataclass(frozen=True)
class Loading:
    """How ``training_data`` is read: DeepSpeed's keys ``data_efficiency.data_sampling`` and ``dataloader_drop_last``.

    Attributes:
        num_workers: loader processes of this rank; 0 for none, then each batch is made when it is drawn.
        pin_memory: whether batches are in pinned memory, where there is a device to copy them to.
        drop_last: whether one pass leaves out the last batch where the data is too short for it.
    """

    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False


def loading_of(config: dict[str, Any], name: str) -> Loading:
    """Returns how a DeepSpeed configuration has ``training_data`` read.

    Args:
        config: DeepSpeed's configuration.
        name: name of the configuration, for errors.

    Raises:
        ConfigurationError: a value is wrong, or DeepSpeed would choose the order of the data, which the server chooses.
    """
    sampling = config.get("data_efficiency", {}).get("data_sampling", {})
    if sampling.get("curriculum_learning", {}).get("enabled"):
        raise ConfigurationError(
            f'{name}: {_KEYS}: "curriculum_learning" is not supported with training_data=, whose order follows the '
            "shards that the server chooses: give your own DataLoader, or leave it out"
        )
    workers, pin = sampling.get("num_workers", 0), sampling.get("pin_memory", False)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigurationError(f'{name}: {_KEYS}: "num_workers" is {workers!r}: give a whole number, 0 for none')
    if not isinstance(pin, bool):
        raise ConfigurationError(f'{name}: {_KEYS}: "pin_memory" is {pin!r}: give true or false')
    return Loading(workers, pin, config.get("dataloader_drop_last") is True)
