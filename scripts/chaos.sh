#!/usr/bin/env bash
# A storm of faults over a real training run, beside the same run without them: what it costs, and the proof that
# nothing was lost or counted twice. Options go to scripts/chaos.py (--help lists them).
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
exec python scripts/chaos.py "$@"
