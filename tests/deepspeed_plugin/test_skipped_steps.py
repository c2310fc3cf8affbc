"""Steps whose gradient has NaN or Inf, in DeepSpeed's synchronous methods."""

from types import SimpleNamespace
from typing import Any

import pytest

from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine
from fairseq_async.errors import AsyncError


class Engine(SynchronousEngine):
    """What counting skipped steps needs of DeepSpeed's engine."""

    def __init__(self, **optimizer: Any) -> None:
        self.optimizer = SimpleNamespace(**optimizer)
        self.global_steps = self.skipped_steps = self.global_samples = self._skipped_in_a_row = self.cleared = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def fp16_enabled(self) -> bool:
        return False

    def train_batch_size(self) -> int:
        return 8

    def steps_per_print(self) -> None:
        """Prints no progress."""

    def zero_grad(self) -> None:
        self.cleared += 1


def test_a_bad_step_counts_as_skipped_and_leaves_no_gradient() -> None:
    engine = Engine()
    assert not engine._skip_step(False) and engine.cleared == 0
    assert engine._skip_step(True)
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.cleared) == (1, 1, 8, 1)
    assert engine.progress == 0 and not engine._step_applied


def test_an_optimizer_that_looks_for_nan_itself_skips_by_itself() -> None:
    engine = Engine(bit16_groups=[[]])
    assert not engine._skip_step(True) and engine.global_steps == engine.cleared == 0


def test_ten_bad_steps_in_a_row_end_the_run_and_nine_with_a_good_one_between_do_not() -> None:
    engine = Engine()
    for bad in [*[True] * 9, False] * 3:
        assert engine._skip_step(bad) == bad
    with pytest.raises(AsyncError, match="the gradients of the last 10 steps had NaN or Inf"):
        for _ in range(10):
            engine._skip_step(True)
