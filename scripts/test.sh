#!/usr/bin/env bash
# The whole check: style, types, tests. Arguments go to pytest.
. "$(dirname "$0")/environment.sh"
export CUDA_VISIBLE_DEVICES=  # what the tests compare are CPUs; scripts/gpu_check.sh has the tests of a GPU
ruff check .
ruff format --check .
mypy
python -m pytest -n 3 --dist loadfile "$@"  # on two cores: some tests wait
