#!/usr/bin/env bash
# Tries this package with other versions: bash scripts/versions.sh [PYTHON:TORCH:DEEPSPEED …]; without arguments the rows below.
# Each row is an environment of its own, of some gigabytes, made in VERSIONS_DIR (default: a new directory in /tmp) and
# removed after the tests. The interpreters are those of this machine, on PATH or of pyenv; fairseq is not installed. At
# the end there is a table of what passed; the log of a row is beside its environment. It takes about 15 minutes a row.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rows=(3.10:2.6.0:0.18.9 3.11:2.13.0:0.18.9 3.11:2.13.0:0.19.0 3.11:2.13.0:0.19.8 3.12:2.10.0:0.19.0 3.13:2.15.0:0.19.8)
tests=(
    tests/algorithms/test_hybrid_accumulation.py tests/algorithms/test_outer_optimizers.py
    tests/pytorch/test_hybrid.py tests/pytorch/test_islands.py tests/pytorch/test_fsdp.py
    tests/deepspeed_plugin/test_compat.py tests/deepspeed_plugin/test_equal_to_plain.py
    tests/deepspeed_plugin/test_parameter_groups.py tests/deepspeed_plugin/test_schedules.py
    tests/deepspeed_plugin/test_checks.py
)
[ $# -eq 0 ] || rows=("$@")
folder=${VERSIONS_DIR:-$(mktemp -d)}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

interpreter() {  # of a minor version of Python
    for each in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        "$each" -c '' 2> /dev/null && { echo "$each"; return; }
    done
}

try() {  # PYTHON TORCH DEEPSPEED: the last line of the tests
    local venv=$folder/$1-$2-$3 python
    python=$(interpreter "$1")
    [ -n "$python" ] || { echo "no Python $1 on this machine"; return 1; }
    {
        rm -rf "$venv" && "$python" -m venv "$venv" &&
            "$venv/bin/pip" install "torch==$2" "setuptools<81" wheel numpy ninja packaging &&
            "$venv/bin/pip" install --no-build-isolation "deepspeed==$3" &&
            "$venv/bin/pip" install "$tree" pytest pytest-timeout hypothesis accelerate &&
            (cd "$tree" && PATH=$venv/bin:$PATH PYTHONPATH=$tree TORCH_EXTENSIONS_DIR=$venv/extensions CUDA_VISIBLE_DEVICES= \
                DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE "$venv/bin/python" -m pytest -q "${tests[@]}")
    } > "$venv.log" 2>&1
    local code=$?
    rm -rf "$venv"
    tail -n 1 "$venv.log"
    return $code
}

tree=$folder/tree  # what is committed: an installation writes beside its sources
rm -rf "$tree" && mkdir -p "$tree" && git -C "$root" archive HEAD | tar -x -C "$tree" || exit 2
failed=0 table="| Python | torch | DeepSpeed | |"$'\n'"|---|---|---|---|"
for row in "${rows[@]}"; do
    IFS=: read -r python torch deepspeed <<< "$row"
    [ -n "${deepspeed:-}" ] || { echo "error: a row is PYTHON:TORCH:DEEPSPEED, as in 3.11:2.13.0:0.19.8; not $row" >&2; exit 2; }
    said=$(try "$python" "$torch" "$deepspeed") && said="passed: $said" || { said="failed: $said"; failed=1; }
    table+=$'\n'"| $python | $torch | $deepspeed | $said |"
    echo "$row $said" >&2
done
echo "$table"
exit $failed
