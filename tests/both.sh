#!/bin/sh
# Run all tests in two parallel halves: both.sh PYTHON [PYTEST ARGUMENTS]. Tests of whole processes
# mostly wait, the others mostly compute, so this halves the time. With arguments, run one pytest
# with them. tests/architecture is omitted, because `make check` runs it.
set -u
python=$1
shift
[ $# -eq 0 ] || exec "$python" -m pytest "$@"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest tests/chaos tests/e2e >"$log" 2>&1 &
whole=$!
trap 'kill "$whole" 2>/dev/null; exit 130' INT TERM
echo "tests/chaos and tests/e2e run in parallel; their output follows at the end:"
"$python" -m pytest tests --ignore=tests/chaos --ignore=tests/e2e --ignore=tests/architecture
computed=$?
wait "$whole"
waited=$?
cat "$log"
[ "$computed" -eq 0 ] && [ "$waited" -eq 0 ]
