#!/bin/sh
# Create a virtual environment: venv.sh PYTHON FOLDER. Debian's python3 lacks ensurepip, which is in
# python3-venv. As root, install that package; otherwise print the command that installs it.
set -eu
python=$1
folder=$2

command -v "$python" >/dev/null 2>&1 || { echo "Penstock needs python3, version 3.11 or newer" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Penstock needs Python 3.11 or newer, and $python is $("$python" -V 2>&1); try: make PYTHON=python3.12 ..." >&2
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "Installing python3-venv (a separate package on Debian)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "This python3 cannot create virtual environments; please run: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
rm -rf "$folder"
"$python" -m venv "$folder"
