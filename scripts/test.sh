#!/usr/bin/env bash
# The whole check: style, types, tests. Arguments go to pytest.
. "$(dirname "$0")/environment.sh"
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 --dist loadfile "$@"
