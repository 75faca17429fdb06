#!/usr/bin/env bash
# The main job: installs what is missing, trains the embedded policy with SPEED-RLOO on this machine, draws the curves.
#   launch/local.sh [--config.section.field=value ...]
# Other runs: CONFIG=configs/embedded.py:rloo WORKDIR=runs/rloo launch/local.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare dev
exec python experiments/train.py --config="${CONFIG:-configs/embedded.py:speed_rloo}" \
  --workdir="${WORKDIR:-runs/local}" "$@"
