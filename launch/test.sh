#!/usr/bin/env bash
# Installs what is missing and passes the tests.
#   launch/test.sh [pytest arguments]
# Tests that compare with torch run where it is installed; RL_SPEED_DATA names the folder of real data, if there is one.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare dev
exec python -m pytest -q -m "not slow" tests "$@"
