# Sourced by the other scripts: makes the project's virtual environment where there is none, and activates it.
#   FAIRSEQ_ASYNC_VENV  where it is (default: .venv in the project)
#   PYTHON              the interpreter that makes it (default: python3; 3.10 to 3.13)
#   WHEELS              a directory of wheels, for a machine that reaches no registry: the environment is made of these
#                       and of the packages of PYTHON, torch among them (CONTRIBUTING.md says how to collect them)
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # else every process would compile what it imports
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${FAIRSEQ_ASYNC_VENV:-$root/.venv}
export TORCH_EXTENSIONS_DIR=$venv/torch_extensions  # of this environment alone: its kernels fit no other
complete=$venv/complete-$(cat setup.py scripts/environment.sh | cksum | cut -d' ' -f1)

if [ ! -f "$complete" ]; then
    export PIP_DISABLE_PIP_VERSION_CHECK=1  # its notice of a newer pip is no part of what this says
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
        echo "error: $python is $("$python" --version 2>&1); set PYTHON to a Python 3.10 to 3.13" >&2
        exit 2
    }
    command -v c++ > /dev/null || { echo "error: no C++ compiler (c++), which fairseq needs to install" >&2; exit 2; }
    echo "making the environment $venv, once:"
    echo "  1/4 an empty virtual environment"
    "$python" -m venv "$venv"
    if [ -n "${WHEELS:-}" ]; then
        echo "  2/4 the packages of $python, and those in $WHEELS"
        packages='import sysconfig; print(sysconfig.get_path("purelib"))'
        "$python" -c "$packages" > "$("$venv/bin/python" -c "$packages")/of_python.pth"
        install=("$python" -m pip --python "$venv/bin/python" install --quiet --ignore-installed)
        install+=(--no-index --no-deps --no-build-isolation)
        "${install[@]}" "$WHEELS"/*.whl
        echo "  3/4 this package"
        "${install[@]}" --editable .
    else
        pip=("$venv/bin/python" -m pip)
        # Modules are compiled when they are first imported, which most are never; packages are built against the torch
        # that is here: with build isolation pip would fetch a second one for that
        install=("${pip[@]}" install --quiet --no-compile --no-build-isolation)
        echo "  2/4 torch and what builds packages (some hundred megabytes to download)"
        "${install[@]}" "torch==2.13.0" "setuptools<85" wheel cython ninja numpy
        echo "  3/4 fairseq, DeepSpeed's kernels for a CPU, which are compiled for minutes, and this package"
        # fairseq's extensions for Levenshtein transformers, BASE layers and monotonic attention, which no test or recipe
        # trains, include torch's headers and take a minute and a half; all others take half a minute. With this in the
        # place of torch they are optional, and left out, since there are no such headers. Not through pip's cache: from
        # there every other environment of this user would get a fairseq without them
        standin=$venv/without_torch/torch
        mkdir -p "$standin/utils"
        touch "$standin/__init__.py" "$standin/utils/__init__.py"
        printf '%s\n' 'from setuptools import Extension' \
            'from setuptools.command.build_ext import build_ext as BuildExtension' \
            'CppExtension = lambda name, sources: Extension(name, sources, optional=True)' \
            > "$standin/utils/cpp_extension.py"
        fairseq=$(sed -n 's/^FAIRSEQ = \["\(.*\)"\]$/\1/p' setup.py)
        PYTHONPATH=$venv/without_torch "${pip[@]}" wheel --quiet --no-cache-dir --no-deps --no-build-isolation \
            --wheel-dir "$venv/wheels" "$fairseq" > "$venv/fairseq.log" 2>&1 &
        compiles=$!
        "${install[@]}" --editable ".[huggingface]"
        # Here, and not by the job that needs one first: a job that is killed while it compiles leaves a lock, for which
        # every later job waits without end
        rm -rf "$TORCH_EXTENSIONS_DIR"
        # A sixth of the time goes into what a debugger reads, if the last word is DeepSpeed's -g
        mkdir -p "$venv/compiler"
        printf '#!/bin/sh\nexec "%s" "$@" -g0\n' "$(command -v c++)" > "$venv/compiler/c++"
        chmod +x "$venv/compiler/c++"
        # One after another: each has two sources, and a compiler takes 2 GB; niced, since other packages come first
        DS_ACCELERATOR=cpu PATH=$venv/compiler:$venv/bin:$PATH nice "$venv/bin/python" > "$venv/kernels.log" 2>&1 -c '
from deepspeed.accelerator import get_accelerator
for kernel in "FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder":
    get_accelerator().create_op_builder(kernel).load()
' &
        kernels=$!
        wait "$compiles" || { kill "$kernels"; cat "$venv/fairseq.log" >&2; exit 2; }
        echo "  4/4 all other packages"
        "${install[@]}" --find-links "$venv/wheels" --editable ".[dev]"
        wait "$kernels" || { echo "error: DeepSpeed's kernels do not compile: see $venv/kernels.log" >&2; exit 2; }
    fi
    touch "$complete"
fi
. "$venv/bin/activate"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
