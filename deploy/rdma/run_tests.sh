#!/bin/sh
# Run pytest in the guest: run_tests.sh PYTHON ARGUMENT... with the Python of a virtual environment
# for the tests. pyverbs comes from Debian and needs Debian's Python; for another PYTHON version, a
# separate environment is created for the guest.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=build/rdma
python=$1
shift

sh "$here/install_packages.sh"
mkdir -p "$out/site"
ln -sfn /usr/lib/python3/dist-packages/pyverbs "$out/site/pyverbs"
export PYTHONPATH="$PWD/$out/site"
if ! "$python" -c 'import pyverbs.qp' 2>/dev/null; then
    make --no-print-directory VENV="$out/venv" PYTHON=/usr/bin/python3 "$out/venv/.dev"
    python=$out/venv/bin/python
fi
# The guest's processor is emulated, so compile all modules to bytecode here, once. pytest compiles
# the tests, because it rewrites their assertions. Errors are ignored here; the guest reports them.
env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q command_line gateway kvtransfer mockgpu planner policies || true
env -u PYTHONDONTWRITEBYTECODE PENSTOCK_RDMA=1 "$python" -m pytest --collect-only -qq "$@" >/dev/null 2>&1 || true
# The limit is for a guest that hangs; an idle machine needs a fraction of it.
exec sh "$here/run_in_guest.sh" "$out" "${GUEST_SECONDS:-900}" env PENSTOCK_RDMA=1 PENSTOCK_RDMA_TRIALS="${RDMA_TRIALS:-68}" \
    PENSTOCK_KV_TRANSPORTS=rdma PENSTOCK_PATIENCE_S=60 PY_COLORS=0 \
    "$python" -X faulthandler -m pytest -o faulthandler_timeout=300 "$@"
