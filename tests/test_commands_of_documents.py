"""Every command of the documents is one that its program takes: flags, methods, files. Data has stand-ins."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from fairseq_async import cli
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.programs import is_fairseq
from tests.helpers.commands import HELPERS, MODEL, PACKAGE, ROOT, Processes
from tests.helpers.documents import commands

OURS = ("fairseq-async", "fairseq-train", "torchrun")
THE_READERS_OWN_SCRIPT = "train.py"
OF_THE_READERS_OWN_RULE = ("--outer", "sign", "--sign-lr", "0.01")  # tests/config has a test of such a rule
SCRIPTS = ("python", "bash", "deepspeed")
GROUP = typer.main.get_command(cli.app)


def completed(job: list[str]) -> list[str]:
    """``fairseq-train`` with a model in the place of the dots, and a method where the reader knows his own."""
    if "--arch" not in job:
        dots = next((index for index, word in enumerate(job) if word in ("...", "…")), None)
        if dots is not None:
            data = ["DATA"] if job[:dots] in ([], ["fairseq-train"]) else []
            job = [*job[:dots], *data, *MODEL, *job[dots + 1 :]]
    job = [word for word in job if word not in ("...", "…")]
    return job if "--optimizer" in job else [*job, "--optimizer", "hybrid_async"]


def fairseq_jobs() -> dict[str, list[str]]:
    """The arguments with which each document's command starts ``fairseq-train``, by the command."""
    jobs = {}
    for name, found in commands(*OURS):
        program, *arguments = found
        if program == "fairseq-async":
            command = GROUP.commands[arguments[0]]  # type: ignore[attr-defined]
            given = command.make_context(arguments[0], arguments[1:]).params
            if not is_fairseq(given.get("worker_command", ["no command of a worker"])):
                continue
            job = completed(list(given["worker_command"]))
            if "sign" in job:
                job = [word for word in job if word not in OF_THE_READERS_OWN_RULE]
            job = WorkerCommand(job, given.get("workers")).line("10.0.0.1:1")[1:]
        elif "fairseq-train" in found:
            job = completed(found[found.index("fairseq-train") + 1 :])
        else:
            continue  # torchrun with a script that the page describes
        jobs[f"{name}: {shlex.join(found)}"] = job
    return jobs


def test_fairseq_takes_the_flags_of_every_command(processes: Processes, tmp_path: Path) -> None:
    """Also that a command names the user directory where nothing else does."""
    jobs = fairseq_jobs()
    assert len(jobs) > 12
    (tmp_path / "jobs.json").write_text(json.dumps(list(jobs.values())))
    code, output = processes.run([sys.executable, HELPERS / "fairseq_commands.py", tmp_path / "jobs.json"])
    assert code == 0, output
    ended = dict(zip(jobs, json.loads(output.splitlines()[-1]), strict=True))
    assert {command: said for command, (code, said) in ended.items() if code} == {}


def sources(path: Path) -> str:
    """A program's text, with that of the programs of the project that it names."""
    text = path.read_text(encoding="utf-8")
    named = {ROOT / each for each in re.findall(r"(?:recipes|scripts)/[\w/]+\.(?:py|sh)", text)} - {path}
    named |= {ROOT / "recipes" / "c4_lm" / each for each in re.findall(r'"\$recipe/(\w+\.py)"', text)}
    modules = re.findall(r"^from ((?:recipes|scripts)[\w.]*) import", text, re.MULTILINE)
    named |= {ROOT.joinpath(*each.split(".")).with_suffix(".py") for each in modules}
    return text + "".join(each.read_text(encoding="utf-8") for each in named if each.is_file())


@pytest.mark.parametrize(
    ("document", "found"),
    [(document, found) for document, found in commands(*SCRIPTS) if THE_READERS_OWN_SCRIPT not in found],
    ids=lambda each: each if isinstance(each, str) else " ".join(each)[:60],
)
def test_a_script_that_a_document_starts_has_the_flags_and_files_that_it_gives(document: str, found: list[str]) -> None:
    script = next(ROOT / word for word in found[1:] if re.search(r"\.(py|sh)$", word))
    assert script.is_file()
    text, behind = sources(script), found[found.index(str(script.relative_to(ROOT))) + 1 :]
    for word in behind:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--"):
            assert re.search(rf"--{name}\b|\b{name.replace('-', '_')}\b", text), f"{document}: {word}"
        elif re.match(r"(recipes|tests|deepspeed_config)/", word):
            assert (ROOT / word).exists(), f"{document}: {word}"


def test_a_flag_that_does_not_exist_is_noticed(processes: Processes, tmp_path: Path) -> None:
    """The checks above can fail: here for a method without our directory, as a page once had it."""
    adascale = [*completed(["DATA", "..."])[:-1], "adascale"]
    (tmp_path / "jobs.json").write_text(json.dumps([adascale, [*adascale, "--user-dir", str(PACKAGE)]]))
    code, output = processes.run([sys.executable, HELPERS / "fairseq_commands.py", tmp_path / "jobs.json"])
    assert code == 0, output
    (without, said), (given, _) = json.loads(output.splitlines()[-1])
    assert without == 2 and "invalid choice: 'adascale'" in said and given == 0
