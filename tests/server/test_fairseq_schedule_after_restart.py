"""A schedule of fairseq that follows losses goes on after a restart: the number of steps does not tell its state."""

import torch

import fairseq_async.fairseq_plugin  # noqa: F401  registers fairseq's components
from fairseq_async.algorithms import Update
from fairseq_async.fairseq_plugin.server import build
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout

FRAMEWORK = {
    "inner_optimizer": {"_name": "sgd", "lr": [1.0], "momentum": 0.0, "weight_decay": 0.0},
    "lr_scheduler": {"_name": "reduce_lr_on_plateau", "lr": [1.0], "lr_shrink": 0.5, "lr_threshold": 1e-4}
    | {"lr_patience": 0, "warmup_updates": 0, "warmup_init_lr": -1.0, "maximize_best_checkpoint_metric": False},
    "clip_norm": 0.0,
}
SPEC = MethodSpec("hybrid_async", 1, {"method": "hybrid_async", "updates_per_step": 1}, framework=FRAMEWORK)
LAYOUT = Layout.of([("w", torch.zeros(1))])


def test_a_schedule_that_follows_losses_knows_the_best_of_them_after_a_restart() -> None:
    """Losses of 2, 3 and 2.5: the rate is halved by the second and, against the first, by the third."""
    parameters = torch.zeros(1)
    before, _ = build(SPEC, LAYOUT, parameters)
    before.end_epoch(1, 2.0)
    before.end_epoch(2, 3.0)
    assert before.learning_rate == 0.5
    after, _ = build(SPEC, LAYOUT, parameters)
    after.load_state_dict(before.state_dict())
    assert after.learning_rate == 0.5
    after.end_epoch(3, 2.5)
    assert after.learning_rate == 0.25
    after.apply(parameters, Update(0, 0, 0, 1.0, torch.ones(1)))
    assert parameters.item() == -0.25
