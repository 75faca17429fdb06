#!/usr/bin/env bash
# One run on a TPU slice of Google Kubernetes Engine, as a JobSet: fills in launch/gke_jobset.yaml and applies it.
#   launch/gke_jobset.sh --name=RUN --image=IMAGE --accelerator=tpu-v5-lite-podslice --topology=4x4 --claim=CLAIM
#       --config=FILE --workdir=/runs/RUN [--mount=/runs] [--chips_per_host=4] [--namespace=default] [--restarts=R] [--print]
#       [train.py flags ...]
# IMAGE has this checkout as its working directory and rl_speed[tpu] installed. CLAIM is a persistent volume claim that all hosts can
# write (ReadWriteMany), mounted at /runs; the workdir must be below. Checked first: kubectl, that JobSet is installed in the cluster,
# the claim, that no JobSet has the name, and that the mesh is of as many devices as the slice has chips. Without mesh flags
# --config.mesh.fsdp takes all.
# A fault or a pre-emption: all pods start again, R (10) times in all. Bad settings (status 2) end the JobSet.
# --print prints the manifest and applies nothing.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
name="" image="" accelerator="" topology="" claim="" mount=/runs chips=4 namespace=default restarts=10 show=""
for word in "$@"; do
  case "$word" in
    --help | -h) usage; exit 0 ;;
    --print) show=1 ;;
    --name=*) name=${word#*=} ;;
    --image=*) image=${word#*=} ;;
    --accelerator=*) accelerator=${word#*=} ;;
    --topology=*) topology=${word#*=} ;;
    --claim=*) claim=${word#*=} ;;
    --mount=*) mount=${word#*=} ;;
    --chips_per_host=*) chips=${word#*=} ;;
    --namespace=*) namespace=${word#*=} ;;
    --restarts=*) restarts=${word#*=} ;;
    *) flags+=("$word") ;;
  esac
done
[[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
  fail "--name must be up to 40 small letters, digits and dashes, a letter first, got '$name'"
[ -n "$image" ] || fail "--image is missing: launch/README.md says how one is made"
[ -n "$accelerator" ] || fail "--accelerator is missing: such as tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice"
[[ $topology =~ ^[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?$ ]] || fail "--topology must be like 4x4 or 2x2x4, got '$topology'"
[ -n "$claim" ] || fail "--claim is missing: a persistent volume claim that all hosts can write (ReadWriteMany)"
for word in "$image" "$accelerator" "$claim" "$mount" "$namespace"; do
  [[ $word =~ ^[A-Za-z0-9_./:@-]+$ ]] || fail "'$word' cannot be the name of an image, an accelerator, a claim, a folder or a namespace"
done
[[ $chips =~ ^[1-9][0-9]*$ ]] || fail "--chips_per_host must be a whole number above 0, got '$chips'"
whole --restarts "$restarts"
require_config_and_workdir
[[ $workdir/ == "${mount%/}"/?* ]] || fail "--workdir=$workdir is not below $mount, where the claim is mounted: pods could not share it"
all=$((${topology//x/*}))
((all >= chips)) || chips=$all
((all % chips == 0)) || fail "$topology has $all chips, which hosts of $chips do not make: see --chips_per_host"
hosts=$((all / chips))
case $accelerator in
  tpu-v4-podslice | tpu-v5-lite-podslice | tpu-v5-lite-device | tpu-v5p-slice | tpu-v6e-slice)
    set_mesh fsdp "$all"
    check_mesh "$all" "the chips of $topology are"
    flags+=("${mesh[@]}")
    ;;
  *) say "nothing is known of the devices of a chip of $accelerator: the mesh is as the flags and the config say" ;;
esac

# json WORDS...: a list of strings, which YAML reads as one. Kubernetes would replace $(NAME) in them, and $$(NAME) stands for it.
json() {
  local word line="" slash=$'\x5c' dollar='$'
  for word in "$@"; do
    word=${word//"$slash"/"$slash$slash"}
    word=${word//'"'/"$slash\""}
    word=${word//$'\n'/"${slash}n"}
    word=${word//$'\t'/"${slash}t"}
    word=${word//"$dollar("/"$dollar$dollar("}
    line+="${line:+, }\"$word\""
  done
  printf '[%s]' "$line"
}

# fill NAME VALUE: puts VALUE where the manifest says ${NAME}.
fill() {
  manifest=${manifest//"\${$1}"/"$2"}
}

manifest=$(sed '/^ *#/d' launch/gke_jobset.yaml)
fill NAME "$name"
fill NAMESPACE "$namespace"
fill RESTARTS "$restarts"
fill HOSTS "$hosts"
fill ACCELERATOR "$accelerator"
fill TOPOLOGY "$topology"
fill IMAGE "$image"
fill CHIPS "$chips"
fill MOUNT "$mount"
fill CLAIM "$claim"
# One host needs no detection, and JAX finds nothing to detect there in every cluster.
((hosts == 1)) || flags+=(--cluster=auto)
fill ARGS "$(json "${flags[@]}")" # last: what the user wrote is not looked through
if [ -n "$show" ]; then
  printf '%s\n' "$manifest"
  exit 0
fi

command -v kubectl > /dev/null || fail "there is no kubectl on this host: https://kubernetes.io/docs/tasks/tools"
kubectl get crd jobsets.jobset.x-k8s.io > /dev/null ||
  fail "the cluster does not answer, or has no JobSet: see kubectl's message above, and https://jobset.sigs.k8s.io/docs/installation"
modes=$(kubectl get pvc "$claim" "--namespace=$namespace" --output=jsonpath='{.spec.accessModes}') ||
  fail "there is no persistent volume claim $claim in the namespace $namespace"
if ((hosts > 1)) && [[ $modes != *ReadWriteMany* ]]; then
  fail "the claim $claim is $modes, and $hosts hosts must write it: ReadWriteMany, such as Filestore's or gcsfuse's"
fi
if kubectl get jobset "$name" "--namespace=$namespace" > /dev/null 2>&1; then
  fail "there is a JobSet $name: kubectl delete jobset $name --namespace=$namespace ends it, and its run saves"
fi
kubectl apply -f - <<< "$manifest"
say "kubectl logs -f --namespace=$namespace -l jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0 shows it"
