#!/usr/bin/env bash
# Style: clang-format for C++ and CUDA, ruff for Python, both in the versions pyproject.toml pins.
#
#   tools/lint.sh check|fix
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin

mapfile -d '' sources < <(find csrc tests benchmarks -type f \
    \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) -print0 | sort -z)
case ${1:-check} in
check)
    "$bin/clang-format" --dry-run -Werror "${sources[@]}"
    "$bin/ruff" check --quiet .
    "$bin/ruff" format --quiet --check .
    ;;
fix)
    "$bin/clang-format" -i "${sources[@]}"
    "$bin/ruff" check --quiet --fix .
    "$bin/ruff" format --quiet .
    ;;
*)
    echo "usage: tools/lint.sh check|fix" >&2
    exit 2
    ;;
esac
