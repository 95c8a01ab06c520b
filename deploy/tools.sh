#!/bin/sh
# Install the tools of `make deploy-check`: tools.sh PYTHON FOLDER. Python packages go into FOLDER
# (400 MB, once, and again when tests/deploy/requirements.txt changes). As root, programs are
# installed from Debian.
set -eu
python=$1
folder=$2
wanted="$(dirname "$0")/../tests/deploy/requirements.txt"

missing=""
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing="$missing nginx-light"
command -v haproxy >/dev/null || [ -x /usr/sbin/haproxy ] || missing="$missing haproxy"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v openssl >/dev/null || missing="$missing openssl"
command -v curl >/dev/null || missing="$missing curl"
if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || { echo "please install:$missing" >&2; exit 1; }
    echo "Installing$missing"
    # Prevent the packages from starting services.
    policy=/usr/sbin/policy-rc.d
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; trap 'rm -f $policy' EXIT; }
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

cmp -s "$wanted" "$folder/installed" && exit 0
echo "Installing the tools that check deploy/ into $folder (once, 400 MB)"
rm -rf "$folder"
"$python" -m pip install -q --target "$folder" -r "$wanted"
cp "$wanted" "$folder/installed"
