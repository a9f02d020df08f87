#!/usr/bin/env bash
# Run the tests; arguments pass through to pytest, e.g. scripts/test.sh tests/test_model.py -k init
set -euo pipefail
source "$(dirname "$0")/setup.sh"

# One thread for each worker: two workers on two cores would otherwise fight over them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
workers=()
[ $# -gt 0 ] || workers=(-n "$(getconf _NPROCESSORS_ONLN)" --dist loadgroup)
exec "$VENV/bin/python" -m pytest ${workers[@]+"${workers[@]}"} "$@"
