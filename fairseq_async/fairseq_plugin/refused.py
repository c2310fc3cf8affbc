"""Checks for flags of fairseq that do not go with our methods, and the defaults that started ranks need."""

import os
from argparse import ArgumentParser, Namespace

import torch
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from omegaconf import DictConfig

from fairseq_async.environment import RANKS, WORKER
from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.fairseq_plugin.shards import directories_of
from fairseq_async.worker.start.context import ranks_of_launcher
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import say
from fairseq_async.worker.start.world import enter_world

LEGACY = ("legacy_ddp", "no_c10d")
_WAITING_BACKENDS = {"fully_sharded", "slowmo"}
_NEEDS_GPU = "fairseq needs a GPU for it; use --bf16, or leave it out"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def enter_worker(default: str) -> tuple[str, int]:
    """Returns the inner optimizer's name, and the number of this worker's ranks, which are its world from now on.

    Ends this process with one line if nobody has started these ranks, as where fairseq would start them itself. These
    flags are parsed here, since fairseq asks for a component's flags before it has parsed any, and decides on its
    processes soon after.
    """
    started = ranks_of_launcher()
    given = _given(default, world_size=started if RANKS in os.environ else max(1, torch.cuda.device_count()))
    if given.distributed_init_method is not None:
        fail("--distributed-init-method: is for processes that wait for each other; leave it out")
    ranks = given.distributed_world_size
    divides = WORKER not in os.environ and _launched() and int(os.environ["WORLD_SIZE"]) % ranks == 0
    if ranks not in (1, started) and not divides:
        fail(
            f"--distributed-world-size is {ranks}: that many ranks of this worker were not started; give "
            f"--distributed-world-size 1, or start them with fairseq-async launch --ranks-per-worker {ranks}, or a "
            "multiple of them with torchrun"
        )
    if divides and 1 < ranks == int(os.environ["WORLD_SIZE"]) and os.environ["RANK"] == "0":
        say(
            f"--distributed-world-size is {ranks}, so all {ranks} ranks are one worker, which trains synchronously; "
            f"give 1 for {ranks} asynchronous workers"
        )
    if ranks != 1:
        with errors_in_one_line():
            enter_world(ranks)
    return str(given.inner_optimizer), ranks


def check_started(default: str, devices: int) -> str:
    """Ends this process with one line if fairseq would look for ranks that nobody has started.

    Args:
        devices: number of GPUs that this process sees; 0 for a run on CPUs.

    Returns:
        the inner optimizer's name.
    """
    given = _given(default, world_size=None)
    if (not devices or _launched()) and given.distributed_init_method is None:
        _check_world_size(given.distributed_world_size)
    return str(given.inner_optimizer)


def started_ranks(devices: int) -> dict[str, str | bool | int]:
    """Returns fairseq's settings for ranks that torchrun or ``fairseq-async launch`` has started.

    fairseq finds started ranks by itself only where each of them sees several GPUs. NCCL wants a GPU for each rank of a
    machine; Gloo serves CPUs, and ranks that share a GPU.

    Args:
        devices: number of GPUs that this process sees; 0 for a run on CPUs.
    """
    settings: dict[str, str | bool | int] = {}
    if _launched():
        settings |= {
            "distributed_init_method": "env://",
            "distributed_no_spawn": True,
            "distributed_rank": int(os.environ["RANK"]),
            "distributed_world_size": int(os.environ["WORLD_SIZE"]),
        }
    if devices:
        settings["device_id"] = device_of_rank(devices)
    if not devices or _launched() and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > devices:
        settings["distributed_backend"] = "gloo"
    return settings


def device_of_rank(devices: int) -> int:
    """Returns the number of this process's GPU, of those that it sees; ranks share them where there are more ranks."""
    return int(os.environ.get("LOCAL_RANK", 0)) % devices


def check_asynchronous(args: Namespace, cfg: DictConfig) -> None:
    """Checks for flags of fairseq that do not go with workers that do not wait for each other.

    Raises:
        ConfigurationError: there is such a flag; names it.
    """
    common, frequency = cfg.common, min(cfg.optimization.update_freq)
    several = cfg.distributed_training.distributed_world_size > 1
    more = {
        "--store-ema": cfg.ema.store_ema,
        "--quantization-config-path": common.quantization_config_path is not None,
        "--fp16-adam-stats": getattr(args, "fp16_adam_stats", False),
        # sets weights to 0
        "--quant-noise-pq": args.optimizer == "hybrid_async" and getattr(args, "quant_noise_pq", 0) > 0,
        "--lr-scheduler pass_through": getattr(args, "lr_scheduler", None) == "pass_through",
        "--record, in workers of several ranks": several and args.record,
        "--shares auto, in workers of several ranks": several and getattr(args, "hybrid_async_shares", "") == "auto",
        "--shards, in workers of several ranks": several and getattr(args, "local_sgd_shards", 0),
    }
    _refuse_flags(args, cfg, more)
    _refuse((frequency < 1, f"--update-freq {frequency}: a step needs a batch; give 1 or more"))


def average_micro_batches(cfg: DictConfig) -> int:
    """Returns the number of batches in a step of a worker; 1 where the server cannot divide them anew."""
    frequencies, several = cfg.optimization.update_freq, cfg.distributed_training.distributed_world_size > 1
    fixed = len(set(frequencies)) > 1 or cfg.optimization.skip_remainder_batch or several
    return 1 if fixed else int(frequencies[0])


def check_shares(cfg: DictConfig) -> int:
    """Returns the number of batches in a step of a worker, which the server is to divide anew.

    Raises:
        ConfigurationError: a flag of fairseq does not go with numbers that change.
    """
    frequencies = cfg.optimization.update_freq
    _refuse(
        (
            len(set(frequencies)) > 1,
            f"--update-freq {','.join(map(str, frequencies))}: with --shares auto a step is always of as many batches "
            "of all workers together; give one number",
        ),
        (cfg.optimization.skip_remainder_batch, "--skip-remainder-batch: not possible with --shares auto"),
        (frequencies[0] == 1, "--shares is auto: give --update-freq of at least 2 to be divided"),
    )
    return int(frequencies[0])


def check_local_schedule(args: Namespace, workers: int) -> None:
    """Checks for a schedule that needs validations: worker 0 alone validates, and each worker has a schedule.

    Raises:
        ConfigurationError: there is such a schedule.
    """
    name = getattr(args, "lr_scheduler", None)
    if workers > 1 and issubclass(LR_SCHEDULER_REGISTRY.get(name, object), ReduceLROnPlateauLRSchedule):
        raise ConfigurationError(
            f"--lr-scheduler {name}: not possible with --optimizer {args.optimizer} and several workers, "
            "because only worker 0 validates; give another schedule, or use --optimizer hybrid_async"
        )


def check_local_precision(cfg: DictConfig) -> None:
    """Checks that fairseq can make the fp32 masters of an fp16 model, which each worker has.

    Raises:
        ConfigurationError: fairseq would make them on a GPU, and there is none, or it is not to be used.
    """
    common = cfg.common
    flat = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    if flat and (common.cpu or not torch.cuda.is_available()):
        raise ConfigurationError(f"--fp16: {_NEEDS_GPU}")


def check_shards(shards: int, cfg: DictConfig) -> None:
    """Checks for flags of fairseq that do not go with shards: the server knows only how many steps of each were drawn.

    Args:
        shards: number of shards; 0 for none.

    Raises:
        ConfigurationError: there is such a flag; names it.
    """
    if not shards:
        return
    frequencies, directories = cfg.optimization.update_freq, len(directories_of(cfg))
    _refuse(
        (
            directories not in (1, shards),
            f"--shards is {shards}: the data has {directories} directories, each of which is a shard; "
            f"give --shards {directories}",
        ),
        (
            len(set(frequencies)) > 1,
            f"--update-freq {','.join(map(str, frequencies))}: with --shards all steps are alike; give one number",
        ),
        (cfg.dataset.curriculum > 0, "--curriculum: not possible with --shards"),
        (
            cfg.checkpoint.reset_dataloader and not cfg.checkpoint.reset_optimizer,
            "--reset-dataloader: with --shards the server knows how far the data is used: leave it out, or begin a new "
            "run with --reset-optimizer",
        ),
    )


def check_synchronous(args: Namespace, cfg: DictConfig, legacy: bool) -> None:
    """Checks for flags of fairseq that do not go with a method that changes the reduction or the step.

    Raises:
        ConfigurationError: there is such a flag; names it.
    """
    common, backend = cfg.common, cfg.distributed_training.ddp_backend
    on_cpu = common.cpu or not torch.cuda.is_available()
    _refuse(
        (
            legacy and backend not in LEGACY,
            f"--ddp-backend {backend}: leave it out; {args.optimizer} reduces itself",
        ),
        (
            on_cpu and backend not in (*LEGACY, *_WAITING_BACKENDS),
            f"--ddp-backend {backend}: fairseq has it for GPUs; leave it out",
        ),
        (common.fp16 and on_cpu, f"--fp16: {_NEEDS_GPU}"),
    )
    more = {
        "--memory-efficient-fp16": common.memory_efficient_fp16,
        "--memory-efficient-bf16": common.memory_efficient_bf16,
    }
    _refuse_flags(args, cfg, more)


def _refuse_flags(args: Namespace, cfg: DictConfig, more: dict[str, bool]) -> None:
    """Refuses the flags that no method of ours has, and those of ``more`` that are given."""
    distributed, backend = cfg.distributed_training, cfg.distributed_training.ddp_backend
    flags = {
        f"--ddp-backend {backend}": backend in _WAITING_BACKENDS,
        f"--zero-sharding {distributed.zero_sharding}": distributed.zero_sharding != "none",
        "--pipeline-model-parallel": distributed.pipeline_model_parallel,
        "--use-bmuf": cfg.optimization.use_bmuf,
        "--amp": cfg.common.amp,
        "--model-parallel-size": cfg.common.model_parallel_size > 1,
    }
    _refuse(
        *((given, f"{flag}: not possible with --optimizer {args.optimizer}") for flag, given in (flags | more).items())
    )


def _refuse(*found: tuple[bool, str]) -> None:
    for given, message in found:
        if given:
            raise ConfigurationError(message)


def _launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process."""
    return all(name in os.environ for name in _LAUNCHED)


def _given(inner: str, world_size: int | None) -> Namespace:
    """Parses the flags on which fairseq acts before it has parsed the others."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--inner-optimizer", default=inner)
    parser.add_argument("--distributed-world-size", type=int, default=world_size)
    parser.add_argument("--distributed-init-method")
    return parser.parse_known_args()[0]


def _check_world_size(given: int | None) -> None:
    """Ends this process with one line if ``given`` is not the number of processes that were started."""
    launched = int(os.environ["WORLD_SIZE"]) if _launched() else 1
    if given not in (None, launched):
        fail(
            f"--distributed-world-size is {given}, and the number of processes that were started is {launched}: "
            "leave the flag out, and start as many as you want with fairseq-async launch or torchrun"
        )
