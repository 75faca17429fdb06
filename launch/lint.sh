#!/usr/bin/env bash
# Installs what is missing; says which files ruff would format or has a complaint about (pyproject.toml). --fix mends them.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare dev
if [ "${1:-}" = "--fix" ]; then
  python -m ruff check --fix .
  exec python -m ruff format .
fi
python -m ruff format --check .
exec python -m ruff check .
