"""Registers the outer rules of this directory; ``FAIRSEQ_ASYNC_PLUGINS`` names this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from fairseq_async.method.methods import OuterRule, register_outer_rule  # noqa: E402
from recipes.rules import baselines, direction_averaging, isoloco, per_step  # noqa: E402

register_outer_rule(
    OuterRule(
        "direction_averaging", direction_averaging.DirectionAveragingOptions, direction_averaging.build, divisible=True
    )
)
register_outer_rule(OuterRule("heavy_ball", baselines.HeavyBallOptions, baselines.heavy_ball, divisible=True))
register_outer_rule(OuterRule("adam", baselines.OuterAdamOptions, baselines.adam, divisible=True))
register_outer_rule(OuterRule("adamw", baselines.OuterAdamWOptions, baselines.adamw, divisible=True))
register_outer_rule(OuterRule("isoloco", isoloco.IsoLoCoOptions, isoloco.build, synchronous=True, divisible=True))
register_outer_rule(OuterRule("per_step", per_step.PerStepOptions, per_step.build, divisible=True))
