"""What ``fairseq-async`` answers before anything slow is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

SCRIPT = """
import sys
from fairseq_async import cli
sys.argv = ["fairseq-async", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    slow = [name for name in ("torch", "fairseq", "deepspeed", "matplotlib") if name in sys.modules]
    print("code", end.code, "imported", slow)
"""
JOB = ["--", "fairseq-train", "data", "--optimizer"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Asynchronous training of Transformers"),
        (["launch", "--help"], 0, "Number of workers on this machine"),
        (["launch", "--no-such-flag"], 2, "No such option"),
        (["launch", "--workers", "2", *JOB, "local_sgd", "--outer", "adagrad"], 2, "--outer: Input should be 'diloco'"),
        (["launch", "--workers", "2", *JOB, "hybrid_async", "--max-refused", "0"], 2, "--max-refused: Input should be"),
        (["launch", "--workers", "2", *JOB, "adasum", "--adasum-form", "x"], 2, "--adasum-form: Input should be"),
        (
            ["launch", "--workers", "2", "--slowdown", "fast", *JOB, "local_sgd"],
            2,
            "--slowdown fast: numbers with commas",
        ),
        (["join", "a", "--token-file", __file__, *JOB, "local_sgd"], 2, "a: an address is written HOST:PORT"),
        (["join", "a:1", "--token-file", "none", *JOB, "local_sgd"], 2, "--token-file none: cannot be read"),
        (["simulate", "none.yaml"], 2, "none.yaml cannot be read"),
        (["audit", "none"], 2, "none: there is no events.jsonl"),
        (["capacity", "none"], 2, "none: no run that can be read there"),
        (["report", "none"], 2, "none: no run and no simulation there"),
        (["watch", "none"], 2, "none: no run there yet"),
        (["replay", "none"], 2, "none: no run there"),
        (["user-dir"], 0, str(ROOT / "fairseq_async")),
    ],
)
def test_help_a_wrong_flag_and_a_missing_file_need_no_torch(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    line = [sys.executable, "-c", SCRIPT, *arguments]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert said in ended.stdout + ended.stderr
    assert f"code {code} imported []" in ended.stdout, ended.stdout + ended.stderr
