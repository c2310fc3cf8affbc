"""Jobs of ``deepspeed_job.py``, each a list of arguments in a JSON file, one after the other without a launcher: their
start takes longest. One that fails leaves a traceback, and nothing in its --out."""

import json
import sys
import traceback
from pathlib import Path

from deepspeed.utils import groups

from tests import deepspeed_job


def main() -> None:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        groups.mpu = None  # DeepSpeed keeps the last engine's
        sys.argv = [deepspeed_job.__file__, *arguments]
        try:
            deepspeed_job.main()
        except (Exception, SystemExit):
            traceback.print_exc()


if __name__ == "__main__":
    main()
