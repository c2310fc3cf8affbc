"""What a reader of the documents has and waits for, made small: data, text, models, lengths, ports.

The names by which the documents call a reader's files (``DATA``, ``DIR`` …) are names of files here, so most
commands need no change for them. What else has to be smaller than in the documents is in two tables: ``SHORTER`` for
the commands, ``SMALLER`` for constants in the recipes, which are a copy here.
"""

import gzip
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.helpers.c4_text import TRAIN_TEXT, VALIDATION_TEXT, write
from tests.helpers.commands import DEEPSPEED_JOB, MODEL, ROOT

# The command of a reader's own fairseq job, where the documents have dots.
JOB = shlex.join([*MODEL, "--max-update", "3", "--keep-last-epochs", "1"])
SHORTER = (
    (r"^(.* (?:--port|join) .*)--max-update 3 ", r"\1--max-update 1000000 "),  # until it is interrupted
    (r"fairseq-train (DATA )?…", r"fairseq-train DATA ..."),
    (r"(fairseq-train\)? \S+(?: --task \S+ --arch \S+)?) \.\.\.", rf"\1 {JOB}"),  # the first dots are the job
    (r" \.\.\.", ""),
    (r"^((?!.*--optimizer).*fairseq-train\)? .*)$", r"\1 --optimizer hybrid_async"),  # among the reader's own flags
    (r"^((?!.*--save-dir).*fairseq-train\)? .*)$", r"\1 --save-dir SAVE_DIR"),
    (r"--max-update 20000", "--max-update 3"),
    (r"(--workers|--nproc-per-node|srun -n) [3-9]", r"\1 2"),
    (r"^torchrun", "torchrun --standalone"),
    (r"--num_(?:gpus|accelerators) \d", "--num_accelerators 2 --master_port 29400"),
    (r"(?:HOST|127\.0\.0\.2|10\.9\.0\.1):29400", "127.0.0.1:29400"),  # this machine is every machine
    (r"HOST\d:", "127.0.0.1:"),
    (r"--host 10\.9\.0\.1", "--host 127.0.0.1"),
    (r"scp A:", "cp "),
    (r"--until \d+", "--until 2"),
    (r"^(fairseq-generate .*)$", r"\1 --max-len-b 5"),
    (r"(?<!/)train\.py --deepspeed ", "deepspeed_job.py --out RUN --deepspeed "),  # the reader's own, of DeepSpeed
    (r"(hf_trainer/train\.py .*)$", r"\1 --epochs 1 --width 32"),
    (r"--model 20m", "--model tiny"),
    (r"(c4_demo\.sh.*|c4_lm/train\.py .*)$", r"\1 --vocab 320 --steps 4"),
    (r"(multi30k_en_de/run\.py.*)$", r"\1 --data DIR --size small --epochs 1"),
)
SMALLER = {
    "recipes/made_up_pair/make_corpus.py": ((r"15_000", "100"), (r"500", "9")),
    "recipes/made_up_pair/run.py": ((r"PIECES = 800", "PIECES = 120"), (r'"max-epoch": 14', '"max-epoch": 1')),
    "recipes/c4_lm/corpus_made_up.py": ((r"6_000", "40"), (r"300", "4")),
    "recipes/translation.py": ((r'"--beam", "5"', '"--beam", "1", "--max-len-b", "5"'),),
    "recipes/multi30k_en_de/run.py": ((r"PAIR, 6000,", "PAIR, 60,"),),
    "deepspeed_config/hybrid_async.json": ((r"64000", "8"),),
}
OUTPUTS = ("SAVE_DIR", "RUN_DIR", "RUN", "async_training", "runs/c4_lm")


def shortened(command: str) -> str:
    """A command of a document, as it is run here."""
    line = re.sub(r"\s+#.*$", "", command)
    for pattern, replacement in [*SHORTER[1:], SHORTER[0]]:
        line = re.sub(pattern, replacement, line, count=1 if "…" in pattern else 0)
    return line


def make(folder: Path, data: Path) -> None:
    """Fills a working directory: the project, as a clone has it, and the reader's own files."""
    for name in ("recipes", "scripts", "deepspeed_config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(DEEPSPEED_JOB, folder)
    (folder / "FILE").write_bytes((ROOT / "README.md").read_bytes()[:8192])
    for name, changes in SMALLER.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in changes:
            text, count = re.subn(old, new, text)
            assert count, f"{name} has no {old}"
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("DATA", "NEWS", "LAW", "TALKS"):
        (folder / name).symlink_to(data)
    _texts(folder / "DIR", data)
    _environment(folder)
    _srun(folder / ".venv" / "bin")


def _texts(folder: Path, data: Path) -> None:
    """Shards of documents for the C4 recipe, and the files of Multi30k."""
    write(folder / "c4-train.00000-of-00001.json.gz", TRAIN_TEXT)
    write(folder / "c4-validation.00000-of-00001.json.gz", VALIDATION_TEXT[:8])
    for split, source, count in (("train", "train", 100), ("val", "valid", 9), ("test_2016_flickr", "valid", 9)):
        for language, ours in (("en", "a"), ("de", "b")):
            lines = (data.parent / f"{source}.{ours}").read_text().splitlines(keepends=True)[:count]
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress("".join(lines).encode()))


def _srun(folder: Path) -> None:
    """Tasks of one machine, with the variables that Slurm gives them; tests/launch has Slurm itself."""
    lines = [
        "#!/bin/bash",
        "count=$2; shift 2; tasks=()",
        "for number in $(seq 0 $((count - 1))); do",
        "    export SLURM_JOB_ID=1 SLURM_PROCID=$number SLURM_LOCALID=$number",
        "    export SLURM_STEP_NUM_TASKS=$count SLURM_STEP_TASKS_PER_NODE=$count",
        '    "$@" & tasks+=($!)',
        "done",
        'for task in "${tasks[@]}"; do wait "$task" || exit 1; done',
    ]
    folder.joinpath("srun").write_text("\n".join(lines) + "\n")
    folder.joinpath("srun").chmod(0o755)


def _environment(folder: Path) -> None:
    """The project's virtual environment, which its scripts take as complete: nothing is downloaded and compiled."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    name = "complete-$(cat setup.py scripts/environment.sh | cksum | cut -d' ' -f1)"
    subprocess.run(["bash", "-c", f"touch .venv/{name}"], cwd=folder, check=True)
