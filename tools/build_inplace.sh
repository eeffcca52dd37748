#!/usr/bin/env bash
# Installs mok editable into the environment of the given Python, once; afterwards ninja compiles
# what changed. Quiet unless something fails.
#
#   tools/build_inplace.sh PYTHON               e.g. tools/build_inplace.sh .venv/bin/python
set -euo pipefail
python=$(realpath -s "$1")
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Whether this Python's mok is this folder, as the last editable install recorded it.
is_installed() {
    [ "$("$python" -c 'import importlib.metadata as m, json
print(json.loads(m.distribution("mok").read_text("direct_url.json"))["url"])' 2>/dev/null)" = \
        "$("$python" -c 'import pathlib; print(pathlib.Path().resolve().as_uri())')" ]
}
if is_installed; then
    command=("$python" setup.py --quiet build_ext --inplace)
else
    echo "mok: building (about a minute)" >&2
    command=("$python" -m pip install --quiet --no-build-isolation --no-deps --editable .)
fi
if ! "${command[@]}" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
