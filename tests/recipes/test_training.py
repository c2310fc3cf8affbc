"""Training by a recipe, which is called again with the same or with other options."""

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.steps import RecipeError
from recipes.training import Method, Training, claim


@pytest.mark.parametrize("state", ["checkpoint_last.pt", "snapshots/version-000000000007.pt"])
def test_a_run_does_not_go_on_from_the_state_of_one_with_other_options(tmp_path: Path, state: str) -> None:
    """Until its first checkpoint, an interrupted run has a snapshot alone."""
    run = Training(tmp_path / "data", tmp_path / "out", Method.HYBRID, 2, 100, {"lr": 1e-3})
    other = replace(run, settings={"lr": 5e-3})
    claim(run)
    claim(other)
    (run.save_dir / state).parent.mkdir(exist_ok=True)
    (run.save_dir / state).touch()
    claim(other)
    with pytest.raises(RecipeError, match="holds a run with other options"):
        claim(run)
