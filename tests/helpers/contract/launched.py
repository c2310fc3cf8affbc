"""One worker of a case, in a script that any launcher starts: ``launched.py FRONT_END CASE METHOD PATH``."""

import os
import sys
from pathlib import Path

from fairseq_async.environment import WORKER
from tests.helpers.contract.job import work
from tests.helpers.contract.net import CASES, Run

if __name__ == "__main__":
    front_end, name, method, path = sys.argv[1:]
    work(front_end, Run(CASES[name], method, Path(path), int(os.environ.get(WORKER) or os.environ.get("RANK", "0"))))
