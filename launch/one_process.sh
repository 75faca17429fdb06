#!/usr/bin/env bash
# One process on this host, with whatever devices it has, started again after a fault.
#   launch/one_process.sh [--print] [--restarts=R] [--extras=tpu|cuda13|cuda12|dev] [train.py flags ...]
# launch/tpu_pod.sh runs this on each worker of a slice. On a single TPU VM it is all that is needed.
# Without --extras the environment is taken as it is. SIGTERM and Ctrl-C: the run saves and ends. A fault: the run starts again,
# R (3) times in a row without a new checkpoint. --print shows the command and starts nothing.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
show="" restarts=3 extras=""
for word in "$@"; do
  case "$word" in
    --help | -h) usage; exit 0 ;;
    --print) show=1 ;;
    --restarts=*) restarts=${word#*=} ;;
    --extras=*) extras=${word#*=} ;;
    *) flags+=("$word") ;;
  esac
done
whole --restarts "$restarts"
require_config_and_workdir

command_of() {
  words=("$python" experiments/train.py "${flags[@]}")
}

if [ -n "$show" ]; then
  print_processes 1
  exit 0
fi
[ -z "$extras" ] || prepare_python "$extras"
keep_running "$workdir" "$restarts" run_processes 1 0 "$workdir"
