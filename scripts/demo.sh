#!/usr/bin/env bash
# From nothing to a BLEU score: makes a virtual environment and a parallel corpus of two invented languages, trains a
# small Transformer with two hybrid asynchronous workers, translates held-out sentences. A second call reuses all files.
# Options go to recipes/made_up_pair/run.py (--help lists them).
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
FAIRSEQ_ASYNC_SCRIPT="bash scripts/demo.sh" exec python recipes/made_up_pair/run.py "$@"
