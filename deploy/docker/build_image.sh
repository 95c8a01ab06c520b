#!/bin/sh
# Build an OCI image without a container builder, from Debian's packages and wheels: build_image.sh PYTHON OUT WHEEL...
# PYTHON is CPython 3.11 with pip, as in Debian 12. The WHEELs are those for it from `make wheel`. OUT is the archive to write, in
# OCI format. It has the contents of the Dockerfile's image: /opt/penstock, user 10001, the same
# entry point. Requirements: root, mmdebstrap and umoci (both Debian packages).
set -eu
python=$1
out=$2
shift 2
here=$(dirname "$0")
for tool in mmdebstrap umoci; do
    command -v "$tool" >/dev/null || { echo "make image needs docker or $tool: apt-get install mmdebstrap umoci" >&2; exit 1; }
done
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "make image needs CPython 3.11, the version of Debian 12: make image PYTHON=python3.11" >&2
    exit 1
}
sources=/etc/apt/sources.list.d/debian.sources
[ -f "$sources" ] || sources=/etc/apt/sources.list
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

# Only packages that Python needs, without package manager and documentation.
mmdebstrap --quiet --variant=essential --include=python3,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --customize-hook='rm -rf "$1"/usr/lib/python3*/test "$1"/var/cache/* "$1"/var/log/* "$1"/var/lib/apt' \
    bookworm "$root" "$sources"

# A virtual environment for the image's Python, whose packages are installed from outside the image.
venv=$root/opt/penstock
site=$venv/lib/python3.11/site-packages
mkdir -p "$venv/bin" "$site"
printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n' >"$venv/pyvenv.cfg"
ln -s /usr/bin/python3 "$venv/bin/python"
# The lock file without setuptools, its last entry. Only wheels, so that no code of the packages runs here.
sed '/^setuptools==/,$d' "$here/../../requirements.lock" >"$work/requirements.lock"
"$python" -m pip install --quiet --no-compile --only-binary=:all: --require-hashes \
    --target "$site" -r "$work/requirements.lock"
"$python" -m pip install --quiet --no-compile --no-deps --target "$site" "$@"
rm -rf "$site/bin"
find "$site/numpy" -type d -name tests -prune -exec rm -rf {} +
printf '#!/opt/penstock/bin/python\nfrom gateway.__main__ import main\n\nmain()\n' >"$venv/bin/penstock"
chmod 0755 "$venv/bin/penstock"
# Bytecode is written only while the image is built.
"$python" -m compileall -q -s "$root" -p / "$site"
echo 'penstock:x:10001:' >>"$root/etc/group"
echo 'penstock:x:10001:10001::/nonexistent:/usr/sbin/nologin' >>"$root/etc/passwd"
install -d -o 10001 -g 10001 -m 0700 "$root/var/lib/penstock"
install -d -m 0755 "$root/etc/penstock"

umoci init --layout "$work/image"
umoci new --image "$work/image:penstock"
tar -C "$root" --numeric-owner --sort=name -cf "$work/layer.tar" .
umoci raw add-layer --image "$work/image:penstock" "$work/layer.tar"
umoci config --image "$work/image:penstock" \
    --config.user 10001:10001 --config.workingdir /var/lib/penstock \
    --config.env PATH=/opt/penstock/bin:/usr/local/bin:/usr/bin:/bin \
    --config.env PYTHONUNBUFFERED=1 --config.env PYTHONDONTWRITEBYTECODE=1 --config.env NO_COLOR=1 \
    --config.exposedports 8080/tcp --config.exposedports 8081/tcp --config.stopsignal SIGTERM \
    --config.entrypoint penstock \
    --config.cmd serve --config.cmd --config --config.cmd /etc/penstock/gateway.yaml
umoci gc --layout "$work/image"
mkdir -p "$(dirname "$out")"
tar -C "$work/image" -cf "$out" .
echo "$out: $(du -m "$out" | cut -f1) MB"
