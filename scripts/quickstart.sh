#!/usr/bin/env bash
# Train five encodings on text that is already on this machine, evaluate them at 1x, 2x and 4x the
# training length, and print the table. Six to eight minutes on two CPU cores, after the install.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

out=${1:-outputs/quickstart-$(date +%Y%m%d-%H%M%S)}
"$VENV/bin/posbench" train -m experiment=quickstart hydra.sweep.dir="$out/train"
"$VENV/bin/posbench" eval-extrapolate runs="$out/train" hydra.run.dir="$out/eval"
