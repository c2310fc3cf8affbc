# Sourced by the other scripts: makes the project's virtual environment where there is none, and activates it.
#   FAIRSEQ_ASYNC_VENV  where it is (default: .venv in the project)
#   PYTHON              the interpreter that makes it (default: python3; 3.10 to 3.13)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${FAIRSEQ_ASYNC_VENV:-$root/.venv}
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
    echo "  1/3 an empty virtual environment"
    "$python" -m venv "$venv"
    echo "  2/3 torch and what builds packages (some hundred megabytes to download)"
    # fairseq is built against the torch that is here: with build isolation pip would fetch a second one for that
    "$venv/bin/python" -m pip install --quiet "torch==2.13.0" "setuptools<85" wheel cython ninja numpy
    echo "  3/3 fairseq, which compiles for minutes, DeepSpeed and this package"
    "$venv/bin/python" -m pip install --quiet --no-build-isolation --editable ".[dev]"
    touch "$complete"
fi
. "$venv/bin/activate"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
