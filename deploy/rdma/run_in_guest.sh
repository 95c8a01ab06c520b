#!/bin/sh
# Run a command in the guest: run_in_guest.sh FOLDER SECONDS COMMAND... with the FOLDER of
# build_boot_image.sh. The guest sees this machine's files read-only and works in the current
# folder; its own writes are lost at its end. It has no network. The exit status is the command's; 124 when time is up, 125 when the
# guest panics or ends without a status.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$1" && pwd)
seconds=$2
shift 2

exchange=$(mktemp -d "$out/exchange.XXXXXX")
trap 'rm -rf "$exchange"' EXIT
quoted=$(for word in "$@"; do printf " '%s'" "$(printf %s "$word" | sed "s/'/'\\\\''/g")"; done)
cat >"$exchange/script" <<SCRIPT
cd '$PWD' && export HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH='${PYTHONPATH:-}' &&
    sh '$here/guest_network.sh'$quoted </dev/null
echo \$? >/run/penstock/status.new && mv /run/penstock/status.new /run/penstock/status
SCRIPT

timeout -k 5 "$seconds" qemu-system-x86_64 \
    -M q35 -accel "${QEMU_ACCEL:-tcg,thread=multi}" -cpu max -smp 2 -m "${GUEST_MB:-2048}" \
    -display none -monitor none -serial stdio -no-reboot -nic none \
    -kernel "$out/vmlinuz" -initrd "$out/initrd.gz" \
    -append "console=ttyS0 quiet panic=-1 no_timer_check nokaslr mitigations=off" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev local,id=exchange,path="$exchange",security_model=none,multidevs=remap \
    -device virtio-9p-pci,fsdev=exchange,mount_tag=exchange \
    -device virtio-rng-pci </dev/null &
guest=$!
trap 'kill "$guest" 2>/dev/null; exit 130' INT TERM
ended=0
wait "$guest" || ended=$?

if [ -s "$exchange/status" ]; then
    exit "$(cat "$exchange/status")"
fi
if [ "$ended" = 124 ] || [ "$ended" = 137 ]; then
    echo "guest: not finished after $seconds s" >&2
    exit 124
fi
echo "guest: ended without the command's status (qemu's status: $ended)" >&2
exit 125
