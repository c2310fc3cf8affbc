"""Records the results of worker 0's validations, for the progress display and for reports."""

import logging
import time
from collections.abc import Callable

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.records.validations import Validation

logger = logging.getLogger(__name__)
_SCORES = ("bleu", "ppl")  # beside fairseq's --best-checkpoint-metric


def note_validation(
    get_valid_stats: Callable[..., StateDict],
    cfg: FairseqConfig,
    trainer: FairseqObject,
    stats: StateDict,
    tracking_best: bool,
) -> StateDict:
    """Wraps fairseq's ``get_valid_stats``, which is called for each validation set; records the first set's result.

    Raises:
        ConfigurationError: a validation has no result with the name of --best-checkpoint-metric.
    """
    wanted = cfg.checkpoint.best_checkpoint_metric
    if tracking_best and wanted not in stats:  # fairseq would say no more than the name, in a traceback
        raise ConfigurationError(f"--best-checkpoint-metric {wanted}: a validation has {', '.join(stats)}")
    found = get_valid_stats(cfg, trainer, stats, tracking_best)
    session = getattr(trainer, "session", None)  # a synchronous run has none
    if session is not None and session.context.rank == 0 and tracking_best:
        names = (wanted, *_SCORES)
        metric = next((name for name in names if name != "loss" and name in found), None)
        score = None if metric is None else float(found[metric])
        loss = float(found["loss"]) if "loss" in found else None
        try:
            Validation(
                time.time(), int(trainer.get_num_updates()), trainer.validated_epoch, loss, metric, score
            ).append(session.run_dir)
        except OSError as error:
            logger.warning("the validation is not recorded: %s", error)
    return found
