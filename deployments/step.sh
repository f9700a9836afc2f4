#!/usr/bin/env bash
# Runs one step of the Makefile: step.sh <what> <what to do when it fails> <command...>
set -uo pipefail
what=$1 remedy=$2
shift 2
echo "==> $what"
start=$(date +%s.%N)
"$@"
status=$?
seconds=$(printf '%.1f' "$(echo "$(date +%s.%N) $start" | awk '{print $1 - $2}')")
if [ "$status" -ne 0 ]; then
    echo "==> FAILED after ${seconds} s: $what" >&2
    echo "    What to do: $remedy" >&2
    exit "$status"
fi
echo "    done in ${seconds} s"
