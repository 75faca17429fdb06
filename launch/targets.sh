#!/usr/bin/env bash
# Makes an environment with the compiler of an accelerator that is not here, for --dry_run --target.
#   launch/targets.sh tpu        # .targets/tpu: 0.6 GB more than rl_speed
# Then: .targets/tpu/bin/python experiments/train.py --config=... --dry_run --target=v5p:2x2x1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
kind="${1:-}"
if [ "$kind" != tpu ] || [ $# -ne 1 ]; then
  echo "usage: launch/targets.sh tpu" >&2
  exit 2
fi
folder=".targets/$kind"
[ -x "$folder/bin/python" ] || "$(find_python)" -m venv "$folder"
# shellcheck disable=SC1091
source "$folder/bin/activate"
prepare "$kind"
echo "$folder/bin/python experiments/train.py --config=... --dry_run --target=..."
