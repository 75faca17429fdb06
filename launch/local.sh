#!/usr/bin/env bash
# The main job: installs what is missing, trains the embedded policy with SPEED-RLOO on this machine, draws the curves.
#   launch/local.sh [--config.section.field=value ...]
# Other runs: CONFIG=configs/embedded.py:rloo WORKDIR=runs/rloo launch/local.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare dev
# Two cores of a CPU are busy with a device each; an accelerator is one.
devices=$(python -c 'import os, jax; print(min(2, os.cpu_count()) if jax.default_backend() == "cpu" else 1)')
exec python experiments/train.py --config="${CONFIG:-configs/embedded.py:speed_rloo}" \
  --workdir="${WORKDIR:-runs/local}" --config.mesh.data="$devices" "$@"
