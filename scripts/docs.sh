#!/usr/bin/env bash
# Builds the site of the documents in build/site/html, every link checked, and serves it on this machine (Ctrl-C ends it).
#   --build  builds only        --check  builds, and looks at every picture and link, in headless Chromium where there is one
# Its environment is .venv-docs, or FAIRSEQ_ASYNC_DOCS_VENV; PORT is 8000 unless it is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${FAIRSEQ_ASYNC_DOCS_VENV:-.venv-docs}
if [ ! -x "$venv/bin/mkdocs" ]; then
    echo "making the environment $venv, once"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r scripts/site/requirements.txt
fi
"$venv/bin/python" scripts/site/stage.py
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" --quiet build --strict
case ${1:-} in
    --build) ;;
    --check) "$venv/bin/python" scripts/site/check.py build/site/html ;;
    *)
        echo "http://127.0.0.1:${PORT:-8000}"
        exec "$venv/bin/python" -m http.server --bind 127.0.0.1 --directory build/site/html "${PORT:-8000}"
        ;;
esac
