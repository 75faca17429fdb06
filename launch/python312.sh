#!/usr/bin/env bash
# Passes the first part of the suite (not `slow`) on Python 3.12, once for each release of JAX; 0.11.2 and 0.12 where none is said.
#   launch/python312.sh [--fresh] [JAX_VERSION...] [-- pytest arguments]
#   launch/python312.sh 0.11.2 -- tests/sampling tests/policy
# The environments are .targets/python312-jax*: made once and kept, made anew with --fresh or where setup.py has changed. Tests that
# compare with torch are skipped there. About half an hour a release on two cores.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fresh="" versions=() failed=()
while (($#)); do
  case "$1" in
    --fresh) fresh=--clear ;;
    --) shift && break ;;
    --help)
      usage
      exit
      ;;
    [0-9]*) versions+=("$1") ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
  shift
done
((${#versions[@]})) || versions=(0.11.2 0.12)
python=$(find_python 3.12)
for version in "${versions[@]}"; do
  folder=".targets/python312-jax$version"
  if [ -n "$fresh" ] || [ ! -x "$folder/bin/python" ]; then "$python" -m venv $fresh "$folder"; fi
  # What is asked for is installed, or nothing: 0.12 is its newest release.
  [[ $version == *.*.* ]] && exact="jax==$version" || exact="jax==$version.*"
  echo "$exact" > "$folder/constraint.txt"
  set +e
  (
    set -e
    # shellcheck disable=SC1091
    source "$folder/bin/activate"
    PIP_CONSTRAINT="$folder/constraint.txt" prepare dev
    python -c 'import jax, sys; print("Python", sys.version.split()[0], "and JAX", jax.__version__)'
    exec python -m pytest -q -m "not slow" -n auto --dist loadfile --no-loadscope-reorder "${@:-tests}"
  )
  status=$?
  set -e
  ((status == 0)) || failed+=("$version (status $status)")
done
((${#failed[@]} == 0)) || fail "the suite fails with JAX ${failed[*]}"
