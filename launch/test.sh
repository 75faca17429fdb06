#!/usr/bin/env bash
# Installs what is missing and passes the tests.
#   launch/test.sh [pytest arguments]
# Tests that compare with torch run where it is installed; RL_SPEED_DATA names the folder of real data, if there is one.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare dev
# Two processes, each test file whole in one of them: files share compiled functions.
exec python -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder tests "$@"
