#!/bin/sh
# Sees to it that the guest's packages are on this machine (packages.txt, one a line): as root the missing ones are
# installed, otherwise this says what to ask for.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

command -v apt-get >/dev/null 2>&1 || { echo "make rdma: the guest is made of Debian 12's packages; there is no apt here" >&2; exit 1; }
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
