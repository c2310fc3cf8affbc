#!/bin/bash
# Asynchronous training on two machines with torchrun; on each of them:  bash torchrun.sh FIRST_MACHINE DATA RUN_DIR
# RUN_DIR is on a file system that the machines share.
set -euo pipefail

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$1:29500" --rdzv-id fairseq-async \
    --no-python fairseq-async worker -- \
    fairseq-train "$2" --save-dir "$3" \
    --arch transformer --share-decoder-input-output-embed --criterion label_smoothed_cross_entropy \
    --label-smoothing 0.1 --max-tokens 4096 --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
    --clip-norm 1.0 --max-update 50000 --optimizer hybrid_async --inner-optimizer adam --adam-betas '(0.9, 0.98)'
