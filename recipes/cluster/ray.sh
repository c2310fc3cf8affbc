#!/bin/bash
# Asynchronous training with fairseq on a Ray cluster, from one of its nodes:  bash ray.sh DATA RUN_DIR
# Start the cluster before: ray start --head --port 6379 on one node, ray start --address HOST:6379 on the others.
# RUN_DIR and the directory in which you call this are on a file system that all nodes share.
set -euo pipefail

fairseq-async ray --workers "4*GPU,2*CPU:4" -- \
    fairseq-train "$1" --save-dir "$2" \
    --arch transformer --share-decoder-input-output-embed --criterion label_smoothed_cross_entropy \
    --label-smoothing 0.1 --max-tokens 4096 --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
    --clip-norm 1.0 --max-update 50000 --optimizer hybrid_async --inner-optimizer adam --adam-betas '(0.9, 0.98)'
