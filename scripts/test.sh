#!/usr/bin/env bash
# The whole check: style, types, tests. Arguments go to pytest.
. "$(dirname "$0")/environment.sh"
export CUDA_VISIBLE_DEVICES=  # what the tests compare are CPUs; scripts/gpu_check.sh has the tests of a GPU
ruff check .
ruff format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy > "$types" 2>&1 &  # beside the tests: on one core it takes a minute where it has no cache
typed=0 tested=0
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || tested=$?  # on two cores: some tests wait
wait $! || typed=$?
cat "$types"
exit $((tested ? tested : typed))
