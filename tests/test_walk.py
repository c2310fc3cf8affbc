"""``docs/architecture.md`` names every file that an update goes through, and no other."""

import re
from pathlib import Path

from fairseq_async.environment import PLUGINS
from tests.helpers.commands import HELPERS, ROOT, Processes, launch_command

PAGE = ROOT / "docs/architecture.md"
PARTS = ("gradient", "exchange", "server")


def named() -> set[str]:
    """The files of the numbered list."""
    text = PAGE.read_text().split("## The life of one update\n")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    steps[-1] = steps[-1].split("\n\n")[0]
    return {name for step in steps for name in re.findall(r"`(\w+(?:/\w+)+\.py)`", step)}


def test_the_page_names_the_files_that_an_update_of_hybrid_async_in_fairseq_goes_through(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    flags = ["--optimizer", "hybrid_async", "--inner-optimizer", "adam", "--max-update", 6]
    plugin = {PLUGINS: str(HELPERS / "walk.py"), "WALK": str(folder)}
    code, output = processes.run(launch_command(data, 1, tmp_path / "run", *flags), **plugin)
    assert code == 0, output
    entered = {file for part in PARTS for file in (folder / part).read_text().splitlines()}
    assert entered == named()
