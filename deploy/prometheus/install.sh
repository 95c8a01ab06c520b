#!/bin/sh
# Debian's Prometheus and promtool, unpacked below FOLDER: nothing is installed, no service starts, no root is needed.
set -eu
folder=$1
test -x "$folder/usr/bin/prometheus" && exit 0
mkdir -p "$folder"
cd "$folder"
apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg -x prometheus_*.deb .
rm prometheus_*.deb
