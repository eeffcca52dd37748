#!/usr/bin/env bash
# Sets up a virtual environment that can build, test and run mok. A second run does nothing.
#
#   tools/setup_env.sh [--torch SPEC] VENV      e.g. tools/setup_env.sh .venv
#
# A torch >= 2.11 that the machine's Python already has is used as it is; otherwise the one of
# constraints.txt (or SPEC, any pip requirement) is installed. PYTHON chooses the interpreter.
# As root on a Debian machine missing compilers and headers are installed, else they are named.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_spec=""
if [ "${1:-}" = "--torch" ]; then
    torch_spec=$2
    shift 2
fi
venv=${1:?usage: tools/setup_env.sh [--torch SPEC] VENV}

# What the environment was made for; the stamp holds it once all is there.
wanted() { "$venv/bin/python" tools/requirements.py build test demo dev && cat constraints.txt && echo "$torch_spec"; }
stamp=$venv/.mok-environment
if [ -e "$stamp" ] && [ "$(wanted)" = "$(cat "$stamp")" ]; then
    exit 0
fi

say() { echo "mok: $*" >&2; }

die() {
    say "$*"
    exit 1
}

# need COMMAND-THAT-SUCCEEDS-WHEN-PRESENT PACKAGE WHAT
need() {
    if bash -c "$1" >/dev/null 2>&1; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $2 ($3 is missing)"
        if [ -z "${apt_updated:-}" ]; then
            apt-get update -qq >&2 || true
            apt_updated=1
        fi
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null || true
    fi
    bash -c "$1" >/dev/null 2>&1 || die "$3 is missing: install it (Debian: apt-get install $2) and try again."
}

has_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_torch() {
    "$1" -c 'import sys, torch; sys.exit([int(p) for p in torch.__version__.split(".")[:2]] < [2, 11])' \
        2>/dev/null
}

# The first Python >= 3.11 that has a suitable torch, else the first Python >= 3.11.
choose_python() {
    local candidates=("${PYTHON:-}") name first=""
    if [ -z "${PYTHON:-}" ]; then
        candidates=(python3 python python3.12 python3.11 python3.13 python3.14 /usr/bin/python3)
    fi
    for name in "${candidates[@]}"; do
        has_python "$name" || continue
        first=${first:-$name}
        if [ -z "$torch_spec" ] && has_torch "$name"; then
            echo "$name"
            return
        fi
    done
    echo "$first"
}

need "${CXX:-g++} --version" g++ "a C++ compiler"
if [ -z "${PYTHON:-}" ]; then
    need "for p in python3 python python3.14 python3.13 python3.12 python3.11; do
              \$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && exit 0; done; exit 1" \
        python3 "Python 3.11 or newer"
fi
python=$(choose_python)
[ -n "$python" ] || die "PYTHON=$PYTHON is not a Python 3.11 or newer: choose another."
need "$python -c 'import ensurepip, venv'" "python3-venv" "Python's venv module"
need "$python -c 'import os, sysconfig
open(os.path.join(sysconfig.get_paths()[\"include\"], \"Python.h\"))'" "python3-dev" "Python's header file Python.h"

make_venv() {
    local site_packages=() outer=""
    if [ -z "$torch_spec" ] && has_torch "$python"; then
        site_packages=(--system-site-packages)
        outer=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    fi
    "$python" -m venv --clear "${site_packages[@]}" "$venv"
    if [ -n "$outer" ] && ! has_torch "$venv/bin/python"; then
        # The torch of another virtual environment, which --system-site-packages does not reach.
        echo "$outer" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/outer.pth"
    fi
}

install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input "$@"; }

# An environment with a torch is kept when only the other requirements have changed.
if [ ! -e "$stamp" ] || ! has_torch "$venv/bin/python"; then
    make_venv
fi
rm -f "$stamp"
torch_requirement=()
if has_torch "$venv/bin/python"; then
    say "using torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
else
    torch_requirement=("${torch_spec:-$(cat constraints.txt)}")
    say "installing ${torch_requirement[*]} (gigabytes, about a minute)"
fi
mapfile -t requirements < <("$venv/bin/python" tools/requirements.py build test demo dev)
install "${torch_requirement[@]}" "${requirements[@]}"
has_torch "$venv/bin/python" || die "the torch in $venv cannot be imported: see $venv/bin/python -c 'import torch'."
wanted >"$stamp"
