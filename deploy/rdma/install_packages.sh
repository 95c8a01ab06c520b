#!/bin/sh
# Check the packages that the guest needs (packages.txt, one per line). As root, install missing
# ones; otherwise print the command that installs them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

command -v apt-get >/dev/null 2>&1 || { echo "make rdma: the guest needs packages of Debian 12, but apt is missing" >&2; exit 1; }
missing=""
while read -r package; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing="$missing $package"
done <"$here/packages.txt"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "make rdma: please run: sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
echo "Installing$missing"
apt-get update -qq
# shellcheck disable=SC2086  # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
