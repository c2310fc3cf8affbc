"""Recipes that are interrupted: the program in front ends by itself, and others are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.steps import RecipeError, once
from tests.helpers.waiting import group_has_ended

ROOT = Path(__file__).resolve().parents[2]
SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    pathlib.Path(sys.argv[1], "started").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(130)
"""
IN_FRONT = """
import sys
from recipes.steps import run_in_front, run_main
def main() -> None:
    sys.exit(run_in_front([sys.executable, "-c", {program!r}, {out!r}]))
run_main(main)
"""
STEP = """
import sys
from pathlib import Path
from recipes.steps import run_main, run_step
def main() -> None:
    run_step("sleeping", [sys.executable, "-c", {program!r}, {out!r}], Path({out!r}, "log"))
run_main(main)
"""


def started(program: str, out: Path) -> subprocess.Popen[bytes]:
    """Starts a recipe in a process group of its own, and waits until its sub-process runs."""
    text = program.format(program=SAVES, out=str(out))
    recipe = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (out / "started").exists():
        assert time.monotonic() < deadline and recipe.poll() is None
        time.sleep(0.02)
    return recipe


def test_a_wrong_option_is_one_line_that_names_the_command_a_user_has_typed() -> None:
    command = [sys.executable, "-c", "from recipes.steps import run_main\ndef main() -> None: pass\nrun_main(main)"]
    environment = {**os.environ, "FAIRSEQ_ASYNC_SCRIPT": "bash scripts/demo.sh"}
    done = subprocess.run(
        [*command, "--nowhere"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    said = "bash scripts/demo.sh: error: No such option: --nowhere; bash scripts/demo.sh --help has the options\n"
    assert done.stderr == said


def test_a_directory_that_cannot_be_made_is_one_line() -> None:
    with pytest.raises(RecipeError, match=r"^/proc/nowhere/text cannot be made: No such file or directory$"):
        once(Path("/proc/nowhere/text"), lambda _: None)


@pytest.mark.parametrize("from_terminal", [True, False])
def test_a_program_in_front_saves_its_work_before_the_recipe_ends(tmp_path: Path, from_terminal: bool) -> None:
    """Ctrl-C goes to both, SIGTERM by a scheduler to the recipe alone."""
    recipe = started(IN_FRONT, tmp_path)
    if from_terminal:
        os.killpg(recipe.pid, signal.SIGINT)
    else:
        recipe.terminate()
    assert recipe.wait(30) == 130
    assert (tmp_path / "saved").exists()


def test_a_step_ends_with_a_recipe_that_is_terminated(tmp_path: Path) -> None:
    recipe = started(STEP, tmp_path)
    recipe.terminate()
    assert recipe.wait(30) == 128 + signal.SIGTERM
    assert group_has_ended(recipe.pid)
