#!/usr/bin/env bash
# One host with GPUs: one process for all of them, or several that share them evenly.
#   launch/gpu_node.sh --config=FILE --workdir=FOLDER [--processes=P] [--print] [--gpus=G] [--restarts=R] [--grace=SECONDS]
#       [--min_disk_gb=GB] [train.py flags ...]
# All GPUs are used, or those in CUDA_VISIBLE_DEVICES, or the first G. Checked before anything starts: nvidia-smi, how many GPUs,
# the driver's version (which decides between CUDA 12 and 13), space for the workdir (10 GB), and that the mesh is of as many
# devices as there are GPUs. Without mesh flags --config.mesh.fsdp takes all.
# A fault: all processes start again, R (3) times in a row without a new checkpoint; with several, the others of one that died have
# SECONDS (30) to end. SIGTERM and Ctrl-C: the run saves and ends. --print shows the commands and starts nothing; where there is no
# nvidia-smi it takes G, or 8.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
count=1 show="" gpus="" restarts=3 grace=30 min_disk_gb=10
for word in "$@"; do
  case "$word" in
    --help | -h) usage; exit 0 ;;
    --print) show=1 ;;
    --processes=*) count=${word#*=} ;;
    --gpus=*) gpus=${word#*=} ;;
    --restarts=*) restarts=${word#*=} ;;
    --grace=*) grace=${word#*=} ;;
    --min_disk_gb=*) min_disk_gb=${word#*=} ;;
    *) flags+=("$word") ;;
  esac
done
[[ $count =~ ^[1-9][0-9]*$ ]] || fail "--processes must be a whole number above 0, got '$count'"
[[ $gpus =~ ^([1-9][0-9]*)?$ ]] || fail "--gpus must be a whole number above 0, got '$gpus'"
whole --restarts "$restarts"
whole --grace "$grace"
whole --min_disk_gb "$min_disk_gb"
require_config_and_workdir

# Which GPUs, and by which CUDA.
present="" driver=""
if command -v nvidia-smi > /dev/null; then
  listed=$(nvidia-smi --query-gpu=index,driver_version --format=csv,noheader 2>&1) ||
    fail "nvidia-smi does not work here: ${listed%%$'\n'*}. Is the NVIDIA driver loaded?"
  present=$(grep -c '^[0-9]' <<< "$listed" || true)
  driver=$(sed -n '1s/.*, *//p' <<< "$listed")
  ((present > 0)) || fail "nvidia-smi lists no GPU on this host"
elif [ -n "$show" ]; then
  present=${gpus:-8}
  say "no nvidia-smi here: as on a host with $present GPUs"
else
  fail "there is no nvidia-smi on this host: install the NVIDIA driver, or train on the CPU with launch/local.sh"
fi
visible=()
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=, read -r -a visible <<< "$CUDA_VISIBLE_DEVICES"
  for gpu in "${visible[@]}"; do
    if [[ $gpu =~ ^-?[0-9]+$ ]] && { ((gpu < 0)) || ((gpu >= present)); }; then
      fail "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names GPU $gpu, and this host has GPUs 0 to $((present - 1))"
    fi
  done
  ((${#visible[@]})) || fail "CUDA_VISIBLE_DEVICES is empty, which hides every GPU: unset it, or name some"
else
  for ((i = 0; i < present; i++)); do visible+=("$i"); done
fi
if [ -n "$gpus" ]; then
  ((gpus <= ${#visible[@]})) || fail "--gpus=$gpus, but only ${#visible[@]} can be seen"
  visible=("${visible[@]:0:gpus}")
fi
total=${#visible[@]}
((total % count == 0)) || fail "$total GPUs cannot be shared evenly by $count processes: choose a --processes that divides $total"
set_mesh fsdp "$total"
check_mesh "$total" "the GPUs are"
extras=cuda13
if [ -n "$driver" ]; then
  [[ $driver =~ ^([0-9]+)\. ]] || fail "nvidia-smi gives '$driver' as the driver's version: nothing is known of that one"
  if ((BASH_REMATCH[1] < 525)); then
    fail "the NVIDIA driver is $driver, and CUDA 12 needs 525 or newer, CUDA 13 580 or newer: update the driver"
  elif ((BASH_REMATCH[1] < 580)); then
    extras=cuda12
  fi
fi

command_of() {
  local share=$((total / count)) shown
  shown=$(IFS=,; echo "${visible[*]:$1*share:share}")
  words=("CUDA_VISIBLE_DEVICES=$shown" "$python" experiments/train.py "${flags[@]}" "${mesh[@]}")
  ((count == 1)) || words+=("--coordinator=localhost:$port" "--processes=$count" "--process=$1")
}

attempt() {
  port=$(free_port)
  run_processes "$count" "$grace" "$workdir"
}

if [ -n "$show" ]; then
  port=$(free_port)
  print_processes "$count"
  exit 0
fi
require_disk "$workdir" "$min_disk_gb"
if [ -z "${RL_SPEED_PYTHON:-}" ]; then
  # CUDA 12's and 13's plugins do not go beside each other: what is installed stays, where the driver is new enough for it.
  has() { "${VIRTUAL_ENV:-.venv}/bin/python" -c "import importlib.util as i, sys; sys.exit(not i.find_spec('$1'))" 2> /dev/null; }
  if has jax_cuda12_plugin; then
    extras=cuda12
  elif has jax_cuda13_plugin; then
    [ "$extras" = cuda13 ] ||
      fail "JAX is installed for CUDA 13, which needs driver 580, and this one is $driver: update it, or make an environment with .[cuda12]"
  fi
fi
say "$total GPUs (driver $driver, rl_speed[$extras]), $count process(es), mesh $mesh_text"
prepare_python "$extras"
keep_running "$workdir" "$restarts" attempt
