"""Every command of the documents is run, on small stand-ins for the reader's data and models, and does what it should.

The commands are taken from the pages when the test runs, and run by a shell, block by block. ``readers_files.py`` says
what is smaller than in the documents, ``forks.py`` how programs start without the seconds of their imports. Those that
look at a finished run or need no training are run by ``test_quick_commands_of_documents.py``. ``NOT_RUN`` has those
that cannot be run here.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import readers_files
from tests.helpers.commands import ROOT, Processes, free_port
from tests.helpers.documents import ALL, QUICK, blocks, scripts
from tests.helpers.forking import OF_DOCUMENTS, OF_TRANSFORMERS, stand_ins, start
from tests.helpers.launched import count
from tests.helpers.readers_files import shortened
from tests.helpers.waiting import wait_until

NOT_RUN = {  # beginnings of commands, and why; where a test has the same, its name
    "bash scripts/test.sh": "it runs these tests",
    ". .venv/bin/activate": "scripts/test.sh has done so before these tests",
    "pip install": "the network; scripts/environment.sh has done so before these tests",
    "docker run": "a container; the page shows one option of it, without an image",
    "ssh -N": "a second machine; tests/launch/test_two_machines.py has one",
    "fairseq-async ray": "Ray, an extra that need not be installed; tests/launch/ray has it",
    "fairseq-async serve": "machines of two regions; tests/launch/test_regions.py has them",
    "fairseq-async launch --workers 4 --token-file token": "one of the two regions of tests/launch/test_regions.py",
    "bash scripts/chaos.sh": "minutes to hours of faults; tests/chaos/test_schedule.py and its neighbours inject each",
    "python scripts/fuzz": "minutes; tests/chaos/test_fuzz.py runs the same fuzzers for seconds",
    "python scripts/bench/": "minutes to hours of measurement; tests/test_quick_commands_of_documents.py parses them",
}
MEASURED = "docs/results/"  # trainings there took hours; test_quick_commands_of_documents.py parses or runs them
LEFT = (  # what a training leaves, by a part of its command
    (r"--optimizer (adasum|adascale)", "checkpoint_last.pt"),
    (r"fairseq-train ", "events.jsonl"),
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
    folder, processes = tmp_path_factory.mktemp("reader"), Processes()
    readers_files.make(folder, data)
    programs = stand_ins(start((*OF_DOCUMENTS, *OF_TRANSFORMERS), {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}))
    try:
        yield Shell(folder, processes, os.pathsep.join([str(programs), f"{folder}/.venv/bin", os.environ["PATH"]]))
    finally:
        processes.end()


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
        for name in readers_files.OUTPUTS:
            shutil.rmtree(shell.folder / name, ignore_errors=True)
    if " --resume " in command:
        interrupt(shell, command.replace(" --resume", ""))
    if command == "fairseq-async replay RUN_DIR":
        shell.run(shortened("fairseq-async launch --workers 2 -- fairseq-train DATA ... --record --save-dir RUN_DIR"))
    shell.run(command)
    for pattern, name in LEFT:
        if re.search(pattern, command):
            assert any((shell.folder / each / name).is_file() for each in readers_files.OUTPUTS), command
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
