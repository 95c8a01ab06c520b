#!/bin/sh
# Make a plain Debian 12 with python3-venv in a folder, to install wheels in: debian_root.sh ROOT. Needs root and mmdebstrap.
set -eu
root=$1
command -v mmdebstrap >/dev/null || { echo "this needs mmdebstrap: apt-get install mmdebstrap" >&2; exit 1; }
sources=/etc/apt/sources.list.d/debian.sources
[ -f "$sources" ] || sources=/etc/apt/sources.list
rm -rf "$root"
mmdebstrap --quiet --variant=minbase --include=python3-venv bookworm "$root" "$sources"
