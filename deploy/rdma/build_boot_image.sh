#!/bin/sh
# Build the guest's boot image: build_boot_image.sh FOLDER writes vmlinuz and initrd.gz there. The
# kernel is the newest Debian kernel 6.1 (the cloud flavour has no soft-RoCE). It is unpacked, not
# installed.
# No KVM is needed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
PATH=$PATH:/usr/sbin:/sbin
modules="virtio_pci crc32_pclmul crc32_generic crc32c_generic 9pnet_virtio 9p overlay dummy rdma_rxe ib_uverbs virtio_rng"

fail() {
    echo "make rdma: $*" >&2
    exit 1
}

newest() {
    apt-cache search --names-only '^linux-image-6\.1\.[0-9.]+-[0-9]+-amd64$' | cut -d' ' -f1 | sort -V | tail -n 1
}

sh "$here/install_packages.sh"
image=$(newest)
if [ -z "$image" ] && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    image=$(newest)
fi
[ -n "$image" ] || fail "the apt sources have no linux-image-6.1.*-amd64 (Debian 12 has it)"
version=${image#linux-image-}

mkdir -p "$out"
work=$(mktemp -d "$out/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "Fetching $image (70 MB, unpacked and not installed)"
# By default apt downloads as a user without access to this folder, and warns.
(cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$image") || fail "cannot download $image"
dpkg -x "$work"/linux-image-*.deb "$work/kernel"
depmod -b "$work/kernel" "$version"

root=$work/root
mkdir -p "$root/bin" "$root/modules"
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$here/guest_init.sh" "$root/init"
chmod 755 "$root/init"
for module in $modules; do
    modprobe -d "$work/kernel" -S "$version" --show-depends "$module" >>"$work/found" || fail "$image has no $module"
done
awk '$1 == "insmod" && !seen[$2]++ {print $2}' "$work/found" >"$work/order"
while read -r path; do
    cp "$path" "$root/modules/"
    basename "$path"
done <"$work/order" >"$root/modules/order"
(cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$work/initrd.gz"

cp "$work/kernel/boot/vmlinuz-$version" "$out/vmlinuz"
mv "$work/initrd.gz" "$out/initrd.gz"
