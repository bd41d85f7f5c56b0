#!/usr/bin/env bash
# Set up this checkout:  ./build.sh            for a CPU
#                        DEEPINFER_ACCELERATOR=nvidia|ascend ./build.sh
#
#   find Python 3.12 -> check the accelerator's toolchain -> find or install uv -> install the lock into .venv -> say what runs
#
# uv.lock holds versions and hashes but no address (tools/relock.py), so a plain `uv sync` has nowhere to fetch from. Here the
# locked requirements go to the registry this machine is set up for; after that `uv sync --locked` finds everything in place.
# Running it again changes nothing and takes a second or two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly PYTHON_VERSION=3.12
readonly UV_RANGE='>=0.13.9,<0.14' # the lock's form is what this line of uv accepts; pyproject.toml has the same limit
readonly VENV=${UV_PROJECT_ENVIRONMENT:-.venv}
readonly ACCELERATOR=${DEEPINFER_ACCELERATOR:-cpu}

usage() {
    cat <<'TEXT'
usage: [DEEPINFER_ACCELERATOR=cpu|nvidia|ascend] ./build.sh [--check]

Makes .venv with Python 3.12 and everything in uv.lock, checks the accelerator's toolchain, and says what will run where.
--check stops after the checks: it installs nothing.
TEXT
}

fail() {
    printf 'build.sh: %s\n' "$*" >&2
    exit 1
}

found() { printf '  %-10s %s\n' "$1" "$2"; }

# Does this command start a Python of the wanted version? pyenv's shims of versions that are not selected exist but don't start.
is_wanted_python() {
    "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$PYTHON_VERSION')" 2>/dev/null
}

find_python() {
    local candidate pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in \
        ${UV_PYTHON:+"$UV_PYTHON"} \
        "$VENV/bin/python" \
        "python$PYTHON_VERSION" python3 python \
        "$pyenv_root"/versions/"$PYTHON_VERSION"*/bin/python \
        "$HOME"/.local/share/uv/python/cpython-"$PYTHON_VERSION"*/bin/python3; do
        if is_wanted_python "$candidate"; then
            # A virtual environment's own interpreter may be gone tomorrow, and a shim may mean another one: name the real file.
            "$candidate" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'
            return
        fi
    done
    return 1
}

is_wanted_uv() {
    local version
    version=$("$1" --version 2>/dev/null) || return 1
    "$PYTHON" - "$version" <<'CODE'
import re, sys
match = re.match(r"uv (\d+)\.(\d+)\.(\d+)", sys.argv[1])
sys.exit(not (match and (0, 13, 9) <= tuple(map(int, match.groups())) < (0, 14)))
CODE
}

find_uv() {
    local candidate
    for candidate in uv .uv/bin/uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$(dirname "$PYTHON")/uv"; do
        if is_wanted_uv "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# First where `pip install` puts commands, so that `uv` is found like any other; into .uv/ where pip may not write there.
install_uv() {
    local python
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1
    if "$PYTHON" -m pip install --quiet "uv$UV_RANGE" >&2 2>/dev/null; then
        command -v pyenv >/dev/null && pyenv rehash
        find_uv && return
    fi
    for python in "$PYTHON" python3 python; do
        if "$python" -m pip install --quiet --upgrade --target .uv "uv$UV_RANGE" >&2; then
            find_uv && return
        fi
    done
    return 1
}

install_locked() {
    local extra=() clear=() requirements
    [ "$ACCELERATOR" = cpu ] || extra=(--extra "$ACCELERATOR")
    if ! is_wanted_python "$VENV/bin/python"; then
        [ ! -f "$VENV/pyvenv.cfg" ] || clear=(--clear) # an environment of another Python; anything else is not ours to clear
        "$UV" venv --quiet ${clear[@]+"${clear[@]}"} --python "$PYTHON" "$VENV" || fail "the environment $VENV could not be made (uv's message is above)"
    fi
    if "$UV" sync --quiet --locked --offline --check ${extra[@]+"${extra[@]}"} 2>/dev/null; then
        found packages "already as locked"
        return
    fi
    "$UV" lock --quiet --check --offline || fail "uv.lock does not agree with the pyproject files: run 'uv lock' and tools/relock.py"
    if [ ! -d wheelhouse ]; then
        requirements=$VENV/locked-requirements.txt
        "$UV" export --quiet --frozen --no-emit-workspace ${extra[@]+"${extra[@]}"} --output-file "$requirements" >/dev/null
        "$UV" pip install --python "$VENV/bin/python" --require-hashes --requirements "$requirements" ||
            fail "the packages could not be installed (uv's message is above): reach a package registry (UV_DEFAULT_INDEX names another one) or fill wheelhouse/ as docs/development.md says"
    fi
    "$UV" sync --quiet --locked ${extra[@]+"${extra[@]}"} ||
        fail "the locked packages are not all there (uv's message is above): see docs/development.md"
    found packages "installed from uv.lock"
}

check_toolchain() {
    [ "$ACCELERATOR" = cpu ] && return
    "$PYTHON" "packages/deepinfer-kernels-$ACCELERATOR/src/deepinfer_kernels_$ACCELERATOR/toolchain.py" ||
        fail "DEEPINFER_ACCELERATOR=$ACCELERATOR needs what is missing above; without it set, ./build.sh sets up the CPU"
}

case "${1:-}" in
    '' | --check) ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && fail "unknown argument '$1'" ;;
esac
case "$ACCELERATOR" in
    cpu | nvidia | ascend) ;;
    *) fail "DEEPINFER_ACCELERATOR is '$ACCELERATOR': it must be cpu, nvidia or ascend (unset means cpu)" ;;
esac
unset VIRTUAL_ENV # uv would warn about another environment that happens to be active

printf 'DeepInfer for %s\n' "$ACCELERATOR"
PYTHON=$(find_python) ||
    fail "Python $PYTHON_VERSION was not found: install it ('pyenv install $PYTHON_VERSION', 'brew install python@$PYTHON_VERSION', your system's package python$PYTHON_VERSION) or set UV_PYTHON to its path"
found python "$("$PYTHON" -c 'import platform; print(platform.python_version())')  $PYTHON"
check_toolchain
[ "${1:-}" != --check ] || exit 0

UV=$(find_uv) || UV=$(install_uv) || fail "uv could not be installed: 'pip install \"uv$UV_RANGE\"' must work with $PYTHON, or put uv on PATH"
found uv "$("$UV" --version | cut -d' ' -f2)  $UV"
install_locked
printf '\n'
# The first import of torch compiles a thousand modules: keep the result, also for those who set this variable.
env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" tools/what_runs.py || fail "the installed packages do not work together (Python's message is above)"
if ! is_wanted_uv uv; then
    mkdir -p .uv/bin
    [ "$UV" = .uv/bin/uv ] || ln -sf "$UV" .uv/bin/uv
    printf '\nuv is not on PATH; for the commands of the README:  export PATH="%s:$PATH"\n' "$PWD/.uv/bin"
fi
