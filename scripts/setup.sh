#!/usr/bin/env bash
# Make .venv and install posbench into it, once; again only when pyproject.toml or constraints change.
# Sourced by the other scripts. PYTHON names another interpreter, VENV another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
stamp="$VENV/.posbench-installed"
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ ! -x "$VENV/bin/posbench" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    python=${PYTHON:-}
    if [ -z "$python" ]; then
        for candidate in python3 python3.13 python3.12 python3.11; do
            if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
    fi
    if [ -z "$python" ]; then
        echo "No Python 3.11, 3.12 or 3.13 found. Name one: PYTHON=/path/to/python3.11 $0" >&2
        exit 2
    fi
    echo "Installing posbench into $VENV with $("$python" --version) (the first time takes minutes)"
    if ! "$python" -m venv "$VENV"; then
        echo "$python made no virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
    echo "$wanted" > "$stamp"
fi
