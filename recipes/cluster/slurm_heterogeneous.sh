#!/bin/bash
# The same with nodes of two kinds:  sbatch slurm_heterogeneous.sh DATA RUN_DIR
# The first group is worker 0, with many cores and much memory for the server; its GPU may be a small one.
#SBATCH --job-name=fairseq-async
#SBATCH --ntasks=1 --cpus-per-task=16 --mem=64G --gpus-per-task=1 --time=24:00:00
#SBATCH hetjob
#SBATCH --ntasks=4 --cpus-per-task=8 --gpus-per-task=1
set -euo pipefail

worker=(
    fairseq-async worker -- \
    fairseq-train "$1" --save-dir "$2" \
    --arch transformer --share-decoder-input-output-embed --criterion label_smoothed_cross_entropy \
    --label-smoothing 0.1 --max-tokens 4096 --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
    --clip-norm 1.0 --max-update 50000 --optimizer hybrid_async --inner-optimizer adam --adam-betas '(0.9, 0.98)'
)
# One srun for all groups: Slurm then numbers their tasks together. It does not take the cores of a task from above.
srun --het-group=0 --cpus-per-task=16 --kill-on-bad-exit=0 "${worker[@]}" : \
    --het-group=1 --cpus-per-task=8 --kill-on-bad-exit=0 "${worker[@]}"
