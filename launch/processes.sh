#!/usr/bin/env bash
# Several processes on this host's CPU, as on several hosts: to try such a run where there are none.
#   launch/processes.sh N [--print] [--restarts=R] [--grace=SECONDS] [--port=PORT] [train.py flags ...]
# Process 0 writes on the terminal, process I to WORKDIR/logs/process_I.out. Ctrl-C and SIGTERM reach all: they save and end.
# When one dies the others have SECONDS (30) to end; then all start again, R (3) times in a row without a new checkpoint.
# Without --config the embedded task is trained by SPEED-RLOO, without --workdir in runs/processes (CONFIG and WORKDIR say
# otherwise), without mesh flags on 2 devices a process. --print shows the commands and starts nothing.
# JAX_PLATFORMS, where set, is left as it is.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
count="" show="" restarts=3 grace=30 port=""
for word in "$@"; do
  case "$word" in
    --help | -h) usage; exit 0 ;;
    --print) show=1 ;;
    --restarts=*) restarts=${word#*=} ;;
    --grace=*) grace=${word#*=} ;;
    --port=*) port=${word#*=} ;;
    *) if [ -z "$count" ]; then count=$word; else flags+=("$word"); fi ;;
  esac
done
[[ $count =~ ^[1-9][0-9]*$ ]] || fail "the first argument is the number of processes, got '$count': launch/processes.sh 2"
whole --restarts "$restarts"
whole --grace "$grace"
[ -z "$port" ] || whole --port "$port"

flag_value config "${flags[@]}" > /dev/null || flags=("--config=${CONFIG:-configs/embedded.py:speed_rloo}" "${flags[@]}")
workdir=$(flag_value workdir "${flags[@]}") || {
  workdir=${WORKDIR:-runs/processes}
  flags+=("--workdir=$workdir")
}
set_mesh data $((2 * count))
((mesh_devices % count == 0)) ||
  fail "the mesh $mesh_text is of $mesh_devices devices, which $count processes cannot share evenly: make the --config.mesh flags" \
    "multiply to a multiple of $count"

command_of() {
  words=("JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}" "$python" experiments/train.py "${flags[@]}" "${mesh[@]}"
    "--coordinator=localhost:$chosen_port" "--processes=$count" "--process=$1")
}

attempt() {
  chosen_port=${port:-$(free_port)}
  run_processes "$count" "$grace" "$workdir"
}

if [ -n "$show" ]; then
  chosen_port=${port:-$(free_port)}
  print_processes "$count"
  exit 0
fi
prepare_python dev
keep_running "$workdir" "$restarts" attempt
