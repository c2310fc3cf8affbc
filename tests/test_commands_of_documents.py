"""Every command of the documents is run, on small stand-ins for the reader's data and models, and does what it should.

The commands are taken from the pages when the test runs, and run by a shell, block by block. The names by
which they call a reader's files (``DATA``, ``DIR`` …) are names of files here. ``SHORTER`` and ``SMALLER`` say what is
smaller than in the documents, ``forks.py`` how programs start without the seconds of their imports. Those that look at
a finished run or need no training are run by ``test_quick_commands_of_documents.py``. ``NOT_RUN`` has those that cannot
be run here.
"""

import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fairseq_async.options.addresses import free_port
from tests.helpers.c4_text import TRAIN_TEXT, VALIDATION_TEXT, write
from tests.helpers.commands import DEEPSPEED_JOB, MODEL, ROOT, Processes
from tests.helpers.documents import ALL, QUICK, blocks, scripts
from tests.helpers.forking import OF_DOCUMENTS, OF_TRANSFORMERS, stand_ins, start
from tests.helpers.launched import count
from tests.helpers.waiting import wait_until

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
    (r"--(ranks-per-worker|distributed-world-size) 4", r"--\1 2"),
    (r"--workers 2 (-- fairseq-train .*--(?:compress|fragments|shards|record))", r"--workers 1 \1"),
    (r"^torchrun", "torchrun --standalone"),
    (r"--num_(?:gpus|accelerators) \d", "--num_accelerators 2 --master_port 29400"),
    (r"(?:HOST|127\.0\.0\.2):29400", "127.0.0.1:29400"),  # this machine is every machine
    (r"HOST\d:", "127.0.0.1:"),
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


OUTPUTS = ("SAVE_DIR", "RUN_DIR", "RUN", "async_training", "runs/c4_lm", "checkpoints", "model")


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
            text, replaced = re.subn(old, new, text)
            assert replaced, f"{name} has no {old}"
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
    for split, source, most in (("train", "train", 100), ("val", "valid", 9), ("test_2016_flickr", "valid", 9)):
        for language, ours in (("en", "a"), ("de", "b")):
            lines = (data.parent / f"{source}.{ours}").read_text().splitlines(keepends=True)[:most]
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
    if compiled := os.environ.get("TORCH_EXTENSIONS_DIR"):  # without it, a command would compile for minutes
        (folder / ".venv" / "torch_extensions").symlink_to(compiled)
    name = "complete-$(cat setup.py scripts/environment.sh | cksum | cut -d' ' -f1)"
    subprocess.run(["bash", "-c", f"touch .venv/{name}"], cwd=folder, check=True)


NOT_RUN = {  # beginnings of commands, and why; where a test has the same, its name
    "bash scripts/test.sh": "it runs these tests",
    ". .venv/bin/activate": "scripts/test.sh has done so before these tests",
    "pip install": "the network; scripts/environment.sh has done so before these tests",
    "docker run": "a container; the page shows one option of it, without an image",
    "ssh -N": "a second machine; tests/launch/test_two_machines.py has one",
    "fairseq-async ray": "Ray, an extra that need not be installed; tests/launch/ray has it",
    "fairseq-async serve": "machines of two regions; tests/launch/test_regions.py has them",
    "fairseq-async launch --workers 4 --token-file token": "one of the two regions of tests/launch/test_regions.py",
    "bash scripts/chaos.sh": "minutes to hours of faults; tests/recipes/test_schedule_of_faults.py injects them",
    "python scripts/fuzz": "minutes; tests/server/test_fuzz.py runs the same fuzzers for seconds",
    "fairseq-async demo": "a minute; tests/cli/test_demo.py has few steps",
    "bash scripts/demo.sh --method": "the recipe without options, and each method by --method all of the other recipe",
    "python recipes/multi30k_en_de/run.py  ": "one run with --method all, which has both methods of this one",
    "python recipes/multi30k_en_de/run.py --method hybrid": "the same",
    "python recipes/multi30k_en_de/run.py --size": "the same; the options are parsed",
    "python recipes/multi30k_en_de/run.py --data": "the same; --data is given to it here",
    "bash scripts/c4_demo.sh --data": "the command without it makes a text and gives it by --data",
    "deepspeed --num_gpus 4 recipes/hf_trainer/": "GPUs; the page has the same command for CPUs",
    "FAIRSEQ_ASYNC_PLUGINS=my_optimizers.py": "a user's file; tests/pytorch/test_brought_state.py writes one",
    "fairseq-async launch --workers 2 -- python recipes/lora/": "a base model; tests/recipes/test_lora.py makes one",
    "deepspeed --num_gpus 2 recipes/lora/": "the same",
    "python scripts/bench/": "minutes to hours of measurement; tests/test_quick_commands_of_documents.py parses them",
}
MEASURED = "docs/results/"  # trainings there took hours; test_quick_commands_of_documents.py parses or runs them
LEFT = (  # what a training leaves, by a part of its command
    (r"--optimizer (adasum|adascale)", "checkpoint_last.pt"),
    (r"fairseq-train ", "events.jsonl"),
    (r" train_deepspeed\.py", "latest"),
    (r" train_trainer\.py", "model.safetensors"),
)


@dataclass
class Shell:
    """A reader's terminal in the working directory."""

    folder: Path
    processes: Processes
    path: str
    exported: list[str] = field(default_factory=list)
    port: int = 0
    ports: dict[str, int] = field(default_factory=dict)  # in place of those of shards

    def start(self, command: str) -> "subprocess.Popen[str]":
        line = "\n".join([*self.exported, f"exec {command}" if re.match(r"[a-z-]+ ", command) else command])
        if "29400" in command and " join " not in command:
            self.port = free_port()
        line = re.sub(r"2940[1-9]", lambda match: str(self.ports.setdefault(match[0], free_port())), line)
        environment = {"PATH": self.path, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PWD": str(self.folder)}
        return self.processes.start(
            ["bash", "-c", f"cd {self.folder}\n" + line.replace("29400", str(self.port))], **environment
        )

    def run(self, command: str, code: int = 0) -> str:
        process = self.start(command)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, f"{command}: code {process.returncode}\n{output[-6000:]}"
        assert "Traceback" not in output, f"{command}:\n{output[-6000:]}"
        return output


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("reader")
    make(folder, data)
    programs = stand_ins(start((*OF_DOCUMENTS, *OF_TRANSFORMERS), {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}))
    with Processes() as processes:
        yield Shell(folder, processes, os.pathsep.join([str(programs), f"{folder}/.venv/bin", os.environ["PATH"]]))


def is_run(document: str, command: str) -> bool:
    if re.match(r"fairseq-async (\w+)", command) and command.split()[1] in {*QUICK} - {"certificates"}:
        return False
    return not any(command.startswith(start) for start in NOT_RUN) and not document.startswith(MEASURED)


@pytest.fixture(scope="module")
def done() -> set[str]:
    """Commands that have been run: several pages have the same."""
    return set()


@pytest.mark.parametrize("document", [name for name in ALL if blocks(name) and not name.startswith(MEASURED)])
def test_every_command_of_a_page_does_what_it_should(shell: Shell, done: set[str], document: str) -> None:
    for name, text in (scripts("README.md") | scripts(document)).items():
        (shell.folder / name).write_text(text)
    shell.exported = []
    if any("CHECKPOINT" in command for block in blocks(document) for command in block.commands):
        run_alone(shell, shortened("fairseq-async launch --workers 2 -- fairseq-train DATA ..."))
        shutil.copy(shell.folder / "SAVE_DIR" / "checkpoint_last.pt", shell.folder / "CHECKPOINT")
    for block in blocks(document):
        wanted = [shortened(command) for command in block.commands if is_run(document, command)]
        joins = any(" join " in command for command in wanted)
        if all(command in done for command in wanted):
            continue
        if joins:
            run_on_two_machines(shell, wanted)
        shards = [shell.start(command) for command in wanted if " shard " in command]
        for command in [] if joins else wanted:
            if command not in done and " shard " not in command:
                run_alone(shell, command)
        for shard in shards:
            output, _ = shard.communicate(timeout=60)
            assert shard.returncode == 0 and output.rstrip().endswith("the run is finished"), output
        done.update(wanted)


def run_alone(shell: Shell, command: str) -> None:
    if command.startswith("export "):
        shell.exported.append(command)
        return
    if command.startswith(("fairseq-async launch", "torchrun", "deepspeed", "DS_ACC", "fairseq-train", "srun")):
        for name in OUTPUTS:
            shutil.rmtree(shell.folder / name, ignore_errors=True)
    if " --resume " in command:
        interrupt(shell, command.replace(" --resume", ""))
    if command == "fairseq-async replay RUN_DIR":
        shell.run(shortened("fairseq-async launch --workers 2 -- fairseq-train DATA ... --record --save-dir RUN_DIR"))
    shell.run(command)
    for pattern, name in LEFT:
        if re.search(pattern, command):
            assert any((shell.folder / each / name).is_file() for each in OUTPUTS), command
            break


def interrupt(shell: Shell, command: str) -> None:
    """Ctrl-C in the middle of a run, which is longer for that."""
    script = shell.folder / "train.py"
    script.write_text(script.read_text().replace("total_steps=200", "total_steps=1000"))
    process = shell.start(command)
    wait_until(lambda: count(shell.folder / "async_training", 0) > 1, 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


def run_on_two_machines(shell: Shell, commands: list[str]) -> None:
    """One more worker joins the run that the first machine has started, and the run is interrupted."""
    run, started = shell.folder / "SAVE_DIR", []
    shutil.rmtree(run, ignore_errors=True)
    try:
        for command in commands:
            if " launch " in command or " join " in command:
                started.append(shell.start(command))
                wait_until(lambda: count(run, 2 if started[1:] else 0) > 0 or started[-1].poll() is not None, 60)
            else:
                shell.run(command)
        codes = [process.poll() for process in started]
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=60)[0][-3000:] for process in started]
    assert codes == [None, None] and count(run, 2) and started[0].returncode == 130, "\n".join(said)


def test_what_is_not_run_is_still_on_a_page() -> None:
    written = [command for name in ALL for block in blocks(name) for command in block.commands]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in written)] == []


def test_a_page_of_results_has_no_commands_but_those_that_are_parsed_or_quick() -> None:
    found = [command for name in ALL if name.startswith(MEASURED) for each in blocks(name) for command in each.commands]
    checked = rf"(python|bash) (recipes|scripts)/|fairseq-async ({'|'.join(QUICK)}) "
    assert found and [command for command in found if not re.match(checked, command)] == []


def test_every_command_is_in_a_block_without_a_language() -> None:
    """Others are not run."""
    program = r"^(\S*=\S+ )?(fairseq-\w+ (?!.*──)|torchrun |deepspeed |python |bash |srun |pip |git )"
    for name in ALL:
        found = re.findall(r"^```\w+\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert [code for code in found if re.search(program, code, re.MULTILINE)] == [], name
