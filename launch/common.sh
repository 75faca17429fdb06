# Sourced by the other scripts: finds Python, makes a virtual environment if none is active, installs what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "rl_speed needs Python 3.11 or newer, and none was found. Install it (on Debian or Ubuntu: apt-get install python3.11" >&2
  echo "python3.11-venv), or point PYTHON to it." >&2
  exit 1
}

# prepare EXTRAS: leaves an environment active in which `pip install -e .[EXTRAS]` has been done for this setup.py.
prepare() {
  if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
      local python
      python=$(find_python)
      echo "Making a virtual environment in .venv with $("$python" --version)"
      if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "The environment could not be made. On Debian or Ubuntu: apt-get install python3-venv" >&2
        exit 1
      fi
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
  fi
  local stamp="$VIRTUAL_ENV/.rl_speed-$1" state
  state="$PWD $(cksum < setup.py)"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
    echo "Installing rl_speed[$1] into $VIRTUAL_ENV (a few minutes the first time)"
    python -m pip install --quiet --disable-pip-version-check -e ".[$1]"
    echo "$state" > "$stamp"
  fi
}
