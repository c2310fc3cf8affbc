#!/usr/bin/env bash
# For a machine with a GPU, in less than ten minutes: copies and training there are equal to those on the CPU (fp32, fp16,
# bf16), Adasum by NCCL where there are two GPUs, the time of an exchange, and one epoch of the Multi30k recipe if MULTI30K
# names the directory of its data. DeepSpeed's islands are not checked.
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch sees no GPU, and this check needs one; everything else: bash scripts/test.sh" >&2
    exit 2
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
timeout 300 python -m pytest -q -rs tests/gpu
timeout 30 python scripts/bench/gpu_exchange.py
if [ -n "${MULTI30K:-}" ]; then
    timeout 210 python recipes/multi30k_en_de/run.py --data "$MULTI30K" --out "$(mktemp -d)" --method hybrid --fp16 --epochs 1
else
    echo "MULTI30K is not set to the recipe's data: the recipe is not run"
fi
