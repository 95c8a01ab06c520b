#!/bin/sh
# Runs the tests in two halves at once: both.sh PYTHON [PYTEST ARGUMENTS]. Whole processes mostly wait for each other, the rest
# mostly computes, so together they take half the time. With arguments of your own it is one pytest. tests/architecture has
# been run by `make check`.
set -u
python=$1
shift
[ $# -eq 0 ] || exec "$python" -m pytest "$@"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest tests/chaos tests/e2e >"$log" 2>&1 &
whole=$!
trap 'kill "$whole" 2>/dev/null; exit 130' INT TERM
echo "tests/chaos and tests/e2e run beside these and are told at the end:"
"$python" -m pytest tests --ignore=tests/chaos --ignore=tests/e2e --ignore=tests/architecture
computed=$?
wait "$whole"
waited=$?
cat "$log"
[ "$computed" -eq 0 ] && [ "$waited" -eq 0 ]
