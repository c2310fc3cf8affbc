#!/usr/bin/env bash
# Injects many faults into a real training run, beside the same run without faults; prints the cost, and proves that
# nothing was lost or counted twice. Options go to scripts/chaos.py (--help lists them).
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
exec python scripts/chaos.py "$@"
