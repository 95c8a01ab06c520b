#!/bin/sh
# Runs pytest in the guest: test.sh PYTHON ARGUMENT... with the Python of a virtual environment that has what the tests
# need. pyverbs comes from Debian and fits Debian's own Python; if PYTHON is of another version, an environment is made
# for the guest alone.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=build/rdma
python=$1
shift

sh "$here/packages.sh"
mkdir -p "$out/site"
ln -sfn /usr/lib/python3/dist-packages/pyverbs "$out/site/pyverbs"
export PYTHONPATH="$PWD/$out/site"
if ! "$python" -c 'import pyverbs.qp' 2>/dev/null; then
    make --no-print-directory VENV="$out/venv" PYTHON=/usr/bin/python3 "$out/venv/.dev"
    python=$out/venv/bin/python
fi
# The guest's processor is emulated: what Python can compile once, here, is not compiled there by every process of a test.
# Tests are compiled by pytest, which rewrites their assertions. A file that does not compile is the guest's to report.
env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q gateway kvtransfer mockgpu planner policies || true
env -u PYTHONDONTWRITEBYTECODE PENSTOCK_RDMA=1 "$python" -m pytest --collect-only -qq "$@" >/dev/null 2>&1 || true
# The limit is for a guest that hangs; a quiet machine needs a fraction of it.
exec sh "$here/guest.sh" "$out" "${GUEST_SECONDS:-900}" env PENSTOCK_RDMA=1 PENSTOCK_RDMA_TRIALS="${RDMA_TRIALS:-68}" \
    PENSTOCK_KV_TRANSPORTS=rdma PENSTOCK_PATIENCE_S=60 PY_COLORS=0 \
    "$python" -X faulthandler -m pytest -o faulthandler_timeout=300 "$@"
