#!/usr/bin/env bash
# A Cloud TPU slice of TPU VMs, one or many: copies this checkout to all workers, installs it there, starts the run, and leaves.
#   launch/tpu_pod.sh --name=TPU [--zone=ZONE] [--project=PROJECT] --config=FILE --workdir=/SHARED/FOLDER [--print] [--restarts=R]
#       [--accelerator=TYPE] [--setup=COMMAND] [train.py flags ...]
#   launch/tpu_pod.sh --name=TPU [...] --logs[=WORKER]     # follows what that worker (0) writes
#   launch/tpu_pod.sh --name=TPU [...] --stop              # SIGTERM on all workers; waits until they have saved
# Checked first: gcloud, that the slice is READY, that the mesh is of as many devices as it has, that no run is under way there, and,
# of several workers, that each sees the workdir. Without mesh flags --config.mesh.fsdp takes all devices of a known type.
# What travels is the last commit. COMMAND runs on each worker before the installation, such as mounting the shared file system.
# A fault on a worker: its process starts again there, R (3) times in a row without a new checkpoint; the others notice and do too.
# --print shows the commands and starts nothing; the slice's type is then what --accelerator says.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
name="" action=start show="" restarts=3 accelerator="" setup="" worker=0 where=()
for word in "$@"; do
  case "$word" in
    --help | -h) usage; exit 0 ;;
    --print) show=1 ;;
    --name=*) name=${word#*=} ;;
    --zone=* | --project=*) where+=("$word") ;;
    --restarts=*) restarts=${word#*=} ;;
    --accelerator=*) accelerator=${word#*=} ;;
    --setup=*) setup=${word#*=} ;;
    --logs) action=logs ;;
    --logs=*) action=logs worker=${word#*=} ;;
    --stop) action=stop ;;
    *) flags+=("$word") ;;
  esac
done
[ -n "$name" ] || fail "--name is missing: which TPU? gcloud compute tpus tpu-vm list --zone=ZONE shows them"
whole --restarts "$restarts"
whole --logs "$worker"
tpu=(gcloud compute tpus tpu-vm)

# on WORKER COMMAND: a shell command on one worker, or on all.
on() {
  words=("${tpu[@]}" ssh "$name" "${where[@]}" "--worker=$1" "--command=$2")
  do_it
}

# do_it: runs `words`, or shows them.
do_it() {
  if [ -n "$show" ]; then quoted "${words[@]}"; else "${words[@]}"; fi
}

# Everything is in ~/rl_speed; what the run writes to its terminal in run.out, the shell that restarts it in run.pid.
# shellcheck disable=SC2016
alive='p=$(cat rl_speed/run.pid 2>/dev/null) && grep -qs one_process "/proc/$p/cmdline"'
if [ -z "$show" ]; then
  command -v gcloud > /dev/null || fail "there is no gcloud on this host: https://cloud.google.com/sdk/docs/install"
fi
case $action in
  logs)
    on "$worker" "tail -n 100 -F rl_speed/run.out"
    exit
    ;;
  stop)
    # shellcheck disable=SC2016
    on all "if $alive; then kill -TERM \"\$p\"; while kill -0 \"\$p\" 2>/dev/null; do sleep 1; done; tail -n 3 rl_speed/run.out; else echo 'no run is under way here'; fi"
    exit
    ;;
esac

require_config_and_workdir
workers=""
if [ -z "$show" ]; then
  state=$("${tpu[@]}" describe "$name" "${where[@]}" '--format=value(state)') ||
    fail "gcloud does not find the TPU $name: see its message above, and --zone and --project"
  [ "$state" = READY ] || fail "the TPU $name is $state, not READY: gcloud compute tpus tpu-vm describe $name says more"
  accelerator=$("${tpu[@]}" describe "$name" "${where[@]}" '--format=value(acceleratorType)')
  # Addresses with ; or , between.
  addresses=$("${tpu[@]}" describe "$name" "${where[@]}" '--format=value(networkEndpoints[].ipAddress)')
  workers=$(tr ';, ' '\n' <<< "$addresses" | grep -c .)
fi
# The number in a type's name counts chips, or cores where a chip had two; JAX has a device for each core up to v3 and for each chip
# after.
devices=""
if [[ $accelerator =~ ^(v2|v3|v4|v5p|v5litepod|v6e)-([0-9]+)$ ]]; then
  devices=${BASH_REMATCH[2]}
  case ${BASH_REMATCH[1]} in v4 | v5p) devices=$((devices / 2)) ;; esac
fi
if [ -n "$devices" ]; then
  set_mesh fsdp "$devices"
  check_mesh "$devices" "a ${accelerator} has"
  flags+=("${mesh[@]}")
else
  say "nothing is known of the number of devices ('$accelerator'): the mesh is as the flags and the config say"
fi

commit=$(git rev-parse --short HEAD)
archive=${TMPDIR:-/tmp}/rl_speed-$commit.tar.gz
if [ -z "$show" ]; then
  found=$(on all "if $alive; then echo a run is under way; fi") || fail "the workers of $name cannot be reached: see the message of gcloud above"
  if [[ $found == *"a run is under way"* ]]; then
    fail "a run is under way on $name: launch/tpu_pod.sh --name=$name --stop ends it, --logs shows it"
  fi
  git diff --quiet HEAD || say "what is not committed does not travel: commit $commit does"
fi
words=(git archive --format=tar.gz "--output=$archive" HEAD)
do_it
words=("${tpu[@]}" scp "$archive" "$name:rl_speed.tar.gz" "${where[@]}" --worker=all)
do_it
[ -z "$setup" ] || on all "$setup"
if [ "$workers" != 1 ]; then
  token=.seen_by_all_$commit
  on 0 "mkdir -p $(quoted "$workdir") && hostname > $(quoted "$workdir/$token")"
  on all "cat $(quoted "$workdir/$token")" ||
    fail "not every worker sees $workdir: mount one file system on all of them (Filestore, or a bucket by gcsfuse), --setup=COMMAND does it"
fi
on all "mkdir -p rl_speed && tar -xzf rl_speed.tar.gz -C rl_speed && cd rl_speed && bash -c 'source launch/common.sh && prepare tpu'"
run=$(quoted bash launch/one_process.sh --extras=tpu "--restarts=$restarts" "${flags[@]}" --cluster=auto)
# setsid and nohup: the run does not end with the connection.
on all "cd rl_speed && { setsid nohup $run >> run.out 2>&1 < /dev/null & echo \$! > run.pid; }"
[ -n "$show" ] || say "started on $name: launch/tpu_pod.sh --name=$name${where[*]:+ ${where[*]}} --logs shows it, --stop ends it"
