#!/bin/sh
# Runs a command in the guest: guest.sh FOLDER SECONDS COMMAND... with FOLDER as build.sh made it. The guest sees this
# machine's files read-only and works from the present folder; what it writes is gone with it; no network leaves it.
# The exit status is the command's own. A guest that panics, hangs or says nothing is a failure (125; 124 when time is up).
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
    sh '$here/inside.sh'$quoted </dev/null
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
    echo "guest: not done after $seconds s" >&2
    exit 124
fi
echo "guest: ended without a word about the command (qemu's status: $ended)" >&2
exit 125
