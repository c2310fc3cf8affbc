"""Commands of ``fairseq-train``, each a list of arguments in a JSON file: what fairseq says to their flags.

fairseq is imported once, and each command is parsed in a process that is forked after that. Where fairseq would begin
to train, the process ends with code 0. Prints a JSON list of exit codes and last lines.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from fairseq_cli import train


def parse(arguments: list[str]) -> tuple[int, str]:
    """The exit code, and the last line of what was said."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            sys.argv = ["fairseq-train", *arguments]
            train.distributed_utils.call_main = lambda *_: os._exit(0)
            train.cli_main()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        lines = said.read().decode().splitlines()
    return os.waitstatus_to_exitcode(status), lines[-1] if lines else ""


if __name__ == "__main__":
    print(json.dumps([parse(arguments) for arguments in json.loads(Path(sys.argv[1]).read_text())]))
