#!/usr/bin/env bash
# Makes .venv ready for every target of the Makefile: pinned dependencies, a CPU torch,
# this checkout in editable mode, and the C++ compiler that AOTInductor calls.
# Running it again costs a second; it leaves a stamp that the Makefile compares with its inputs.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv
torch=$(sed -n 's/^torch==//p' constraints.txt)

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Installs Debian packages where that is possible, else says what to run.
need() {
    local what=$1; shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $* ($what)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    else
        die "$what is missing. Install it and run this again; on Debian or Ubuntu: sudo apt-get install $*"
    fi
}

command -v "$python" >/dev/null || need "Python 3.10 or newer" python3 python3-venv
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || die "$("$python" -V) is too old: 3.10 or newer is needed. Name one with PYTHON=/path/to/python3.11"

command -v "${CXX:-g++}" >/dev/null || need "a C++ compiler (AOTInductor calls it)" g++
command -v curl >/dev/null || need "curl (the examples of docs/rest.md are run)" curl
# The server's programs, which tests start themselves; Debian has them outside PATH.
command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null \
    || need "PostgreSQL (tests run the service on it)" postgresql

if ! [ -x "$venv/bin/python" ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need "Python's venv module" python3-venv
    say "creating $venv with $("$python" -V)"
    "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# A plain `torch` on Linux brings gigabytes of CUDA. The CPU build carries a local version,
# so it is asked for by that name: first where pip looks anyway (a mirror, a wheel folder),
# then on the index that torch itself publishes it on. Elsewhere the plain build is the CPU build.
if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$torch')" 2>/dev/null; then
    say "installing torch $torch for CPU"
    pip install -qq "torch==$torch+cpu" -c constraints.txt 2>/dev/null \
        || pip install -qq "torch==$torch+cpu" -c constraints.txt \
            --extra-index-url https://download.pytorch.org/whl/cpu --retries 1 2>/dev/null \
        || { say "no CPU build of torch $torch found, taking the plain one"; pip install -qq "torch==$torch" -c constraints.txt; }
fi

say "installing aotcache and what its tests need"
pip install -qq -c constraints.txt -e '.[dev]' -r tests/integration/requirements.txt
pip install -qq -c constraints.txt --no-deps -r tests/integration/requirements-no-deps.txt

# Two packages lie outside of aotcache/ (see package-dir in pyproject.toml). mypy, and a checkout that is
# on PYTHONPATH instead of being installed, find them by links.
ln -sfn ../api aotcache/api
ln -sfn ../migrations aotcache/migrations

touch "$venv/.ready"
say "done"
