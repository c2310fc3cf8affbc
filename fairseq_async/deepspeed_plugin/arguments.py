"""The arguments of a script's ``initialize``: checks them, and makes DeepSpeed's engine and the loader from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils.data import Dataset

from fairseq_async.deepspeed_plugin import checks
from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.compat import DeepSpeedOptimizer, check_whole_model, is_raised_by_script
from fairseq_async.deepspeed_plugin.compilation import waiting_for_compilers
from fairseq_async.deepspeed_plugin.data import Collate, DataShare, ShardedLoader, fix_batch_size
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.hybrid import HybridEngine
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine
from fairseq_async.deepspeed_plugin.loading import loading_of
from fairseq_async.deepspeed_plugin.schedules import Schedule
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.methods import MethodOptions
from fairseq_async.worker.shards import DataPosition

_LONGEST = 300  # characters of a reason: some show a whole tensor
# DeepSpeed checks little of a configuration: a wrong value raises what it leads to, somewhere in DeepSpeed
_MISTAKES = (ValueError, TypeError, KeyError, AttributeError, AssertionError, NotImplementedError, DeepSpeedConfigError)
_initialize_deepspeed = deepspeed.initialize  # DeepSpeed's own, also after attach() has replaced it

Config: TypeAlias = dict[str, Any]  # DeepSpeed's configuration, without our section: JSON
MethodEngine: TypeAlias = AsyncEngine | SynchronousEngine
_Made: TypeAlias = tuple[DeepSpeedEngine, DeepSpeedOptimizer, Schedule | None]
_Join: TypeAlias = Callable[[], DataPosition]


@dataclass(frozen=True)
class Arguments:
    """The arguments that a script has given ``initialize``, without the configuration.

    Attributes:
        others: further arguments, passed on to ``deepspeed.initialize`` as they are.
        name: name of the configuration, for errors.
    """

    args: object
    model: nn.Module | None
    training_data: Dataset[object] | None
    collate_fn: Collate | None
    others: dict[str, object]
    name: str

    def check(self, config: Config, in_the_server: bool) -> None:
        """Checks for mistakes that would end in a traceback of DeepSpeed's, or of torch's.

        Args:
            in_the_server: whether the optimizer is to step in the server.

        Raises:
            ConfigurationError: there is a mistake; names the key.
        """
        checks.check_model(self.model)
        checks.check_values(config, self.name)
        checks.check_optimizer(config, self.name, self.others["optimizer"] is not None, in_the_server)
        checks.check_scheduler(config, self.name, self.others["lr_scheduler"] is not None)
        if in_the_server:
            checks.check_divided(config, self.name, self.others)
        if self.training_data is not None:
            loading_of(config, self.name)  # raises where a key is wrong; read again when the loader is made
            checks.check_accumulation(config, self.name)

    def make_engine(self, config: Config, **more: object) -> _Made:
        """Makes DeepSpeed's own engine, optimizer and schedule, without the data, for which it would make a loader.

        Raises:
            ConfigurationError: DeepSpeed does not take the configuration, or the model is divided by other means than
                ZeRO. An error of the script's own code, which DeepSpeed calls, such as a function that makes the
                optimizer, stays as it is.
        """
        args = configuration.without_file(self.args)
        try:
            with waiting_for_compilers():
                engine, optimizer, _, schedule = _initialize_deepspeed(
                    args=args, model=self.model, collate_fn=self.collate_fn, config=config, **self.others | more
                )
        except _MISTAKES as error:
            if is_raised_by_script(error):
                raise
            said = " ".join(str(error).split())[:_LONGEST] or "no reason given"
            raise ConfigurationError(f"{self.name}: DeepSpeed refuses this: {said} ({type(error).__name__})") from error
        check_whole_model(engine)
        return engine, optimizer, schedule

    def make_loader(
        self,
        engine: MethodEngine,
        sizes: list[int],
        options: MethodOptions,
        ranks: tuple[int, int],
        join: _Join,
        config: Config,
    ) -> ShardedLoader | None:
        """Makes a loader of this rank's batches; returns None without training data.

        Args:
            sizes: samples in each shard.
            ranks: this rank, and the number of ranks that share the batches.
        """
        if self.training_data is None:
            return None
        batch_size, micro_batches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        share = DataShare(sizes, engine.workers, batch_size, micro_batches, *ranks)
        loading = loading_of(config, self.name)
        fix_batch_size(engine)
        shared = engine if isinstance(engine, HybridEngine) and engine.spec.micro_batches else None
        if shared:
            shared.deals = True
        return ShardedLoader(
            self.training_data,
            share,
            options.seed,
            self.collate_fn,
            join,
            options.total_steps > 0,
            loading,
            lambda: shared.trained if shared else int(engine.global_steps) * micro_batches,
        )
