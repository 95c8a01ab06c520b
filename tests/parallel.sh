#!/bin/sh
# Run all checks and tests in three parallel jobs: parallel.sh PYTHON [PYTEST ARGUMENTS]. Tests of
# whole processes mostly wait, the others mostly compute. With arguments, run one pytest with them.
set -u
python=$1
shift

# Compile each module once, not again in each of the hundreds of processes that tests start.
unset PYTHONDONTWRITEBYTECODE
# aiohttp loads all certificates of the machine's authorities when it is imported, which takes a
# fifth of a process's start. Tests trust authorities of their own; this one has no private key.
export SSL_CERT_FILE="$PWD/tests/data/authority.pem" SSL_CERT_DIR="$PWD/tests/data/authorities"

[ $# -eq 0 ] || exec "$python" -m pytest "$@"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
"$python" -m compileall -q command_line gateway kvtransfer mockgpu planner policies
# The tests of whole processes are in two halves, so that the three jobs take about the same time.
(
    "$python" -m mypy && "$python" -m pytest tests/architecture
    failed=$?
    "$python" -m pytest tests/chaos tests/e2e/test_a*.py tests/e2e/test_batch_*.py && exit "$failed"
    exit 1
) >"$logs/checks" 2>&1 &
checks=$!
"$python" -m pytest tests/e2e --ignore-glob="*/e2e/test_a*.py" --ignore-glob="*/e2e/test_batch_*.py" \
    >"$logs/processes" 2>&1 &
processes=$!
trap 'kill "$checks" "$processes" 2>/dev/null; exit 130' INT TERM
echo "Types, tests/architecture, tests/chaos and tests/e2e run in parallel; their output follows at the end:"
"$python" -m pytest tests --ignore=tests/chaos --ignore=tests/e2e --ignore=tests/architecture
failed=$?
wait "$checks" || failed=1
wait "$processes" || failed=1
cat "$logs/checks" "$logs/processes"
exit "$failed"
