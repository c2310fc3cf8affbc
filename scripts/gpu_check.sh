#!/usr/bin/env bash
# For a machine with a GPU: bash scripts/gpu_check.sh [PART …]; each part is within nine minutes, and all of them are the default.
#   tests     copies, training and a server on the GPU are equal to those on the CPU; Adasum by NCCL where there are two GPUs
#   times     an exchange, by this package's copies and tensor by tensor
#   training  tokens a second of one worker and of two beside plain fairseq's, with the server on the CPU, in 8 shards,
#             and on the GPU
#   profile   where the time of a plain step of fairseq goes, by torch's profiler
#   recipe    an epoch of the Multi30k recipe at its published size
#   c4        400 steps a worker of the C4 recipe's 60m model in bf16
# MULTI30K and C4 name the directories of the recipes' data; a part without its data is left out, with a line. Results go to
# OUT (runs/gpu), as JSON where they are figures. DeepSpeed's islands are not checked.
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch sees no GPU, and this check needs one; everything else: bash scripts/test.sh" >&2
    exit 2
}
out=${OUT:-runs/gpu}
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/device.txt" || true

tests() { timeout 500 python -m pytest -q -rs tests/gpu; }
times() { timeout 60 python scripts/bench/gpu_exchange.py | tee "$out/gpu_exchange.txt"; }
training() {  # ten runs of half a minute, then six
    local line=(python scripts/bench/gpu_training.py --out "$out/training" --seconds 15 --skip 5) failed=0
    timeout 330 "${line[@]}" --json "$out/gpu_training_all.json" || failed=1
    timeout 210 "${line[@]}" --workers 2 --pair --json "$out/gpu_training_2_workers.json" || failed=1
    return $failed
}
profile() { timeout 300 python scripts/bench/plain_step.py --out "$out/profile" --json "$out/plain_step.json"; }
recipe() {
    [ -n "${MULTI30K:-}" ] || { echo "recipe: left out, MULTI30K is not set"; return 0; }
    timeout 540 python recipes/multi30k_en_de/run.py --data "$MULTI30K" --out "$out/multi30k" --method hybrid --size published --fp16 --epochs 1
}
c4() {
    [ -n "${C4:-}" ] || { echo "c4: left out, C4 is not set"; return 0; }
    python -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1])) | {"bf16": {"enabled": True}}))' \
        deepspeed_config/delayed_nesterov_dylu.json > "$out/c4_bf16.json"
    timeout 540 deepspeed --log_level warning --num_accelerators 1 recipes/c4_lm/train.py --deepspeed \
        --deepspeed_config "$out/c4_bf16.json" --model 60m --data "$C4" --steps 400 --eval-every 200 --out "$out/c4"
}

[ $# -gt 0 ] || set -- tests times training profile recipe c4
failed=0
for part in "$@"; do
    case $part in
    tests | times | training | profile | recipe | c4) "$part" || { echo "error: $part has failed" >&2; failed=1; } ;;
    *)
        echo "error: there is no part $part; parts are tests, times, training, profile, recipe, c4" >&2
        exit 2
        ;;
    esac
done
exit $failed
