"""Jobs of ``deepspeed_job.py``, each a list of arguments in a JSON file, one after the other without a launcher.

DeepSpeed is imported once: each job is a process that is forked after that. One that fails leaves nothing in its --out.
"""

import json
import os
import sys
from pathlib import Path

from tests.helpers import deepspeed_job


def main() -> None:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        if os.fork() == 0:
            sys.argv = [deepspeed_job.__file__, *arguments]
            return deepspeed_job.main()  # and ends, as the script would
        os.wait()


if __name__ == "__main__":
    main()
