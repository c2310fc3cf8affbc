"""Lets this process's programs of Python start as forks (``forked.py``) of processes that import what they need.

There is one such process for each set of frameworks, from when a test first needs it to the end of the tests. Those of
a larger set are forks of that of a smaller one.
"""

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_async.exchange.linux import environment
from tests.helpers.commands import DEEPSPEED, FAIRSEQ, HELPERS, ONE_THREAD, ROOT
from tests.helpers.forked import SCRIPTS, Forked, ask

SECONDS = 120  # for imports
# The first optimizer of a process imports torch._dynamo, which takes more of its time than a short training does.
COMMON = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "pydantic",
    "typer",
    "rich.live",
    "cryptography.x509",
    "encodings.idna",  # of a socket's address
)
# The last four come with an engine, and torch's compiler with Muon, for which ZeRO looks whether or not it is used.
OF_DEEPSPEED = (
    *COMMON,
    "deepspeed",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "deepspeed.module_inject",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
)
OF_FAIRSEQ = ("fairseq_cli.train", "fairseq_cli.preprocess", *COMMON)  # it says how messages look, as none before does
OF_DOCUMENTS = (  # of all programs that they have
    *OF_FAIRSEQ,
    "fairseq_cli.generate",
    *OF_DEEPSPEED,
    "matplotlib.pyplot",
    "sacrebleu",
    "sentencepiece",
)
OF_TRANSFORMERS = ("transformers.trainer", "transformers.models.llama.modeling_llama")
FRAMEWORKS = {  # by what a command has; the last names those whose process goes on to import these
    r"hf_|c4": (OF_TRANSFORMERS, DEEPSPEED, r"deepspeed"),
    r"deepspeed": (OF_DEEPSPEED, DEEPSPEED, r""),
    r"fairseq-|fairseq_(?!async)": (OF_FAIRSEQ, FAIRSEQ, r""),
    r"": (COMMON, {"PYTHONPATH": str(ROOT)}, None),
}
USUAL = subprocess.Popen
_started: dict[str, Path] = {}


def install() -> None:
    """From now on ``subprocess.Popen`` forks."""
    Forked.folder_for = staticmethod(_folder_for)
    subprocess.Popen = Forked  # type: ignore[misc]


def command_line(process: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of a process; of a fork ``/proc`` has those of the process that was forked.

    Raises:
        OSError: it has ended.
    """
    folder = Path(f"/proc/{process}")
    words = (folder / "cmdline").read_text(errors="replace").split("\0")[:-1]
    if str(HELPERS / "forks.py") in words:
        for each in _started.values():
            path = each / f"{process}.json"
            if path.exists():
                record = json.loads(path.read_text())
                return record["arguments"], record["variables"]
    pairs = (folder / "environ").read_text(errors="replace").split("\0")
    return words, {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}


def _folder_for(words: Sequence[str]) -> Path:
    text = " ".join(Path(word).name for word in words)
    return _started_for(next(pattern for pattern in FRAMEWORKS if re.search(pattern, text)))


def _started_for(pattern: str) -> Path:
    if pattern not in _started:
        _started[pattern] = start(*FRAMEWORKS[pattern])
    return _started[pattern]


def stand_ins(folder: Path) -> Path:
    """A folder for ``PATH``: with a stand-in for each program, so that a shell's commands are forks, too."""
    text = (HELPERS / "fork_client.py").read_text().replace("SOCKET", repr(str(folder / "socket")))
    (folder / "bin").mkdir()
    for name in ("python", "python3", "deepspeed", *SCRIPTS):
        path = folder / "bin" / name
        path.write_text(f"#!{sys.executable} -IS\n{text}")
        path.chmod(0o755)
    return folder / "bin"


def start(modules: Sequence[str], variables: Mapping[str, str], before: str | None = "") -> Path:
    """Starts a process that imports the modules, and ends with this; its folder.

    It is a fork of the one for ``before``, if any, which has imported others.
    """
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    own = os.environ | ONE_THREAD | environment() | variables
    process = None
    with (folder / "log").open("w") as log:
        if before is None:
            line = [sys.executable, str(HELPERS / "forks.py"), str(folder), *modules]
            process = USUAL(line, stdin=subprocess.PIPE, stdout=log, stderr=log, env=own, start_new_session=True)
            atexit.register(_end, process, folder)
        else:
            ask(_started_for(before), [], own, dict.fromkeys((1, 2), log.fileno()), serves=str(folder), modules=modules)
            atexit.register(shutil.rmtree, folder)
    deadline = time.monotonic() + SECONDS
    while not (folder / "ready").exists():
        lives = process is None or process.poll() is None
        assert lives and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.02)
    return folder


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    shutil.rmtree(folder)
