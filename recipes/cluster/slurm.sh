#!/bin/bash
# Asynchronous training with fairseq on several nodes of a Slurm cluster:  sbatch slurm.sh DATA RUN_DIR
# RUN_DIR is on a file system that all nodes share. Each task is a worker; task 0 also starts the server.
#SBATCH --job-name=fairseq-async
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# Without --kill-on-bad-exit=0 a cluster may be set up to end all tasks when one fails; the others can go on.
srun --kill-on-bad-exit=0 fairseq-async worker -- \
    fairseq-train "$1" --save-dir "$2" \
    --arch transformer --share-decoder-input-output-embed --criterion label_smoothed_cross_entropy \
    --label-smoothing 0.1 --max-tokens 4096 --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
    --clip-norm 1.0 --max-update 50000 --optimizer hybrid_async --inner-optimizer adam --adam-betas '(0.9, 0.98)'
