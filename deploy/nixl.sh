#!/bin/sh
# Puts NIXL beside what the tests need: nixl.sh PYTHON FOLDER. The environment in FOLDER sees the packages of PYTHON's
# own. Without its dependencies: they are CUDA and PyTorch, 5.9 GB, and nothing here asks for them.
set -eu
python=$1
folder=$2

if ! "$folder/bin/python" -c 'import nixl._api' 2>/dev/null; then
    sh "$(dirname "$0")/venv.sh" "$python" "$folder"
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$site" >"$("$folder/bin/python" -c "$site")/penstock.pth"
    "$folder/bin/python" -m pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
fi
