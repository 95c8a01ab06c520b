#!/bin/sh
# Unpack Debian's Prometheus and promtool below FOLDER: install.sh FOLDER. This installs nothing,
# starts no service and needs no root.
set -eu
folder=$1
test -x "$folder/usr/bin/prometheus" && exit 0
mkdir -p "$folder"
cd "$folder"
apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg -x prometheus_*.deb .
rm prometheus_*.deb
