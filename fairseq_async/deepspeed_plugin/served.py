"""What an engine of ``hybrid_async`` leaves to the server: its optimizer, learning rates and clipping, as JSON."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import JsonValue

from fairseq_async.deepspeed_plugin import optimizers, schedules
from fairseq_async.deepspeed_plugin.tensors import trainable
from fairseq_async.method_spec import JsonObject


def without_schedule(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without a schedule of DeepSpeed's: the server builds it from the rates before its warm-up."""
    if not schedules.is_deepspeeds(config.get("scheduler")):
        return config
    return {key: value for key, value in config.items() if key != "scheduler"}


def describe(engine: DeepSpeedEngine, config: dict[str, Any], total_steps: int) -> JsonObject:
    """What the server builds from; the engine gets the schedule that :func:`without_schedule` has left out.

    Args:
        engine: as DeepSpeed has made it, of that configuration.
        config: the whole one.
        total_steps: of the server in the whole run; 0 for no end.

    Raises:
        ConfigurationError: the server has nothing that would step equally.
    """
    optimizer, scheduler = engine.optimizer, config.get("scheduler")
    inner: JsonObject = {
        "optimizer": optimizers.describe(optimizer, trainable(engine)),
        "scheduler": None,
        "clip_norm": float(engine.gradient_clipping()),
    }
    if engine.lr_scheduler is not None:
        rates = schedules.tabulate(engine.lr_scheduler, optimizer, total_steps)
        inner["scheduler"] = {"rates": [list[JsonValue](row) for row in rates]}
    elif scheduler is not None and schedules.is_deepspeeds(scheduler):
        inner["scheduler"] = scheduler
        engine.lr_scheduler = schedules.build(scheduler, optimizer)
    return inner
