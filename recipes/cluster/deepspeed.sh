#!/bin/bash
# A script that calls fairseq_async.deepspeed_plugin, on the machines of the hostfile; on the first of them:
#   bash deepspeed.sh train.py --deepspeed_config ds_config.json
# "run_dir" in the JSON is on a file system that the machines share.
# The environment is at the same path on all machines: DeepSpeed starts the workers by ssh, which has another PATH.
set -euo pipefail

deepspeed --hostfile "$(dirname "$0")/hostfile" --no_python --no_local_rank \
    "$(command -v fairseq-async)" worker -- "$(command -v python)" "$@"
