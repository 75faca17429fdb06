#!/usr/bin/env bash
# Makes an environment with the compiler of an accelerator that is not here, for --dry_run --target.
#   launch/targets.sh tpu        # .targets/tpu: 0.6 GB more than rl_speed
#   launch/targets.sh cuda13     # .targets/cuda13: 4.4 GB more; cuda12 likewise
# Then: .targets/tpu/bin/python experiments/train.py --config=... --dry_run --target=v5p:2x2x1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
kind="${1:-}"
case "$#$kind" in
  1tpu | 1cuda12 | 1cuda13) ;;
  *)
    echo "usage: launch/targets.sh tpu|cuda12|cuda13" >&2
    exit 2
    ;;
esac
folder=".targets/$kind"
[ -x "$folder/bin/python" ] || "$(find_python)" -m venv "$folder"
# shellcheck disable=SC1091
source "$folder/bin/activate"
prepare "$kind"
echo "$folder/bin/python experiments/train.py --config=... --dry_run --target=..."
