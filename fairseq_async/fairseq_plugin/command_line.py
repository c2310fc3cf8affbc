"""The ``fairseq-train`` command of a recorded run, which worker 0 writes and the replay parses again."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.utils import split_paths

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig

_FILE = "command.json"


def write_command(run_dir: Path) -> None:
    """Writes this process's arguments and directory, and what its arithmetic depends on: threads, torch's version."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = {"arguments": sys.argv[1:], "directory": os.getcwd(), "threads": torch.get_num_threads()}
    (run_dir / _FILE).write_text(json.dumps(command | {"torch": torch.__version__}, indent=1) + "\n")


def read_command(run_dir: Path) -> tuple[FairseqConfig, int]:
    """Returns fairseq's configuration as the recorded process had it, and the number of that process's threads.

    Also changes to the directory in which the run was started, to which its paths are relative.

    Raises:
        ConfigurationError: there is no recorded command, fairseq does not take it any more, or its directory or data
            are not there any more.
    """
    try:
        command = json.loads((run_dir / _FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{run_dir}: no command of fairseq-train is recorded there ({error}); give the directory of a run that was "
            "started with --record"
        ) from error
    directory = command["directory"]
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigurationError(
            f'{run_dir / _FILE}: the run was started in {directory} ({error.strerror}): give as "directory" the one '
            "to which the command's paths are relative"
        ) from error
    arguments = _without_our_directory(command["arguments"])
    with patch.object(sys, "argv", ["fairseq-train", *arguments]):
        parser = options.get_training_parser()
        try:
            cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
        except SystemExit as error:
            raise ConfigurationError(f"{run_dir / _FILE}: fairseq-train does not take this command here") from error
    for path in split_paths(getattr(cfg.task, "data", None) or ""):
        if not ("://" in path or os.path.isdir(path)):
            where = os.path.abspath(path)
            raise ConfigurationError(
                f"{run_dir / _FILE}: the data of the run, {where}, is not there any more; put it back there"
            )
    return cfg, int(command["threads"])


def _without_our_directory(arguments: list[str]) -> list[str]:
    """Returns the arguments without ``--user-dir`` if that names this package, which is imported already."""
    package = Path(__file__).parents[1].name
    pairs = enumerate(zip(arguments, arguments[1:], strict=False))
    ours = {index for index, (flag, value) in pairs if flag == "--user-dir" and Path(value).name == package}
    return [each for index, each in enumerate(arguments) if not {index, index - 1} & ours]
