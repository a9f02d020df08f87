#!/usr/bin/env bash
# Train five encodings on text that is already on this machine, evaluate them at 1x, 2x and 4x the
# training length, and print the table. Six to eight minutes on two CPU cores, after the install.
# quickstart.sh DIR keeps both in DIR/train and DIR/eval; the same DIR again goes on with a stopped one.
set -euo pipefail
caller=$PWD
source "$(dirname "$0")/setup.sh" # goes to the folder of the checkout

if [ $# -gt 0 ]; then
    case $1 in /*) out=$1 ;; *) out=$caller/$1 ;; esac
    train=$out/train eval=$out/eval
else # where a bare `posbench eval-extrapolate` looks for the newest sweep
    outputs=${POSBENCH_OUTPUTS:-outputs} name=quickstart-$(date +%Y%m%d-%H%M%S)
    train=$outputs/train/$name eval=$outputs/eval-extrapolate/$name
fi
"$VENV/bin/posbench" train -m experiment=quickstart hydra.sweep.dir="$train"
"$VENV/bin/posbench" eval-extrapolate runs="$train" hydra.run.dir="$eval"
