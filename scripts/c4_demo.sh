#!/usr/bin/env bash
# From nothing to a perplexity: makes a virtual environment and a text in an invented language, trains a tiny language
# model with two asynchronous workers under DeepSpeed (local SGD, delayed Nesterov), scores it on documents that it has
# not seen. A second call reuses all files, and resumes an interrupted training.
#   --data DIR  train on your own text instead: recipes/c4_lm/README.md describes the format
# Options go to recipes/c4_lm/train.py (--help lists them).
set -euo pipefail
export FAIRSEQ_ASYNC_SCRIPT="bash scripts/c4_demo.sh"
here=$PWD
. "$(dirname "$0")/environment.sh"  # also changes into the project
recipe=$root/recipes/c4_lm
case " $* " in
    *" --help "* | *" -h "*) exec python "$recipe/train.py" --help ;;
    *" --data "* | *" --data="*) set -- --out "$root/runs/c4_demo_data" "$@" ;;
    *)
        text=$(python "$recipe/corpus_made_up.py" "$root/runs/c4_demo/text")
        set -- --data "$text" --vocab 2000 --out "$root/runs/c4_demo" "$@"
        ;;
esac
read -r devices port < <(python - << 'END'
import socket, torch
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
print(torch.cuda.device_count(), listener.getsockname()[1])
END
)
if [ "$devices" -lt 2 ]; then
    export DS_ACCELERATOR=cpu
fi
cd "$here"  # where relative paths among the options belong
# an own port: with the same port, the workers of two demos would connect to one server
exec deepspeed --log_level warning --num_accelerators 2 --master_port "$port" "$recipe/train.py" --deepspeed \
    --deepspeed_config "$recipe/demo.json" --model tiny --eval-every 200 --resume "$@"
