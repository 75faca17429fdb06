#!/usr/bin/env bash
# What srun starts on each node for launch/slurm.sbatch: one process, and a note of how it ended.
#   launch/slurm_task.sh STATUSES PROGRAM ARGUMENTS...      (SLURM_PROCID says which process)
# The note is STATUSES/process_I: its status and this host. A process that saved and stopped counts as a success to srun, which would
# otherwise kill the others while they save.
set -u
statuses=$1
shift
# Slurm signals all of a task: the process saves, and this shell waits for it.
trap : TERM INT
# With it JAX takes one GPU for each task, whatever it is told.
unset SLURM_LOCALID
if [ "$SLURM_PROCID" != 0 ]; then
  exec >> "$(dirname "$statuses")/process_$SLURM_PROCID.out" 2>&1
fi
status=0
"$@" "--process=$SLURM_PROCID" || status=$?
echo "$status $(hostname)" > "$statuses/process_$SLURM_PROCID"
case $status in
  130 | 143) exit 0 ;;
  *) exit "$status" ;;
esac
