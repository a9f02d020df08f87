#!/usr/bin/env bash
# Run the tests; arguments pass through to pytest, e.g. scripts/test.sh tests/test_model.py -k init
set -euo pipefail
source "$(dirname "$0")/setup.sh"

# One thread for each worker: two workers would otherwise fight over two cores. A file stays in one
# worker, so that what its tests share is made once.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
workers=()
cores=$("$VENV/bin/python" -c "from posbench.cli.slots import cores; print(cores())")
[ $# -gt 0 ] || workers=(-n "$cores" --dist loadfile)
exec "$VENV/bin/python" -m pytest ${workers[@]+"${workers[@]}"} "$@"
