#!/bin/busybox sh
# The guest's first process: modules, then the host's files read-only under a tmpfs overlay, then the one script it is for.
# A guest that fails anywhere here powers off without having written a status, and the host counts that as a failure.
/bin/busybox mkdir -p /proc /sys /dev /host /layer /root /tmp
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module" || echo "guest: cannot load $module"
done </modules/order

nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$nine,ro,cache=loose" host /host &&
    mount -t tmpfs tmpfs /layer && mkdir /layer/upper /layer/work &&
    mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root || poweroff -f
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts devpts /root/dev/pts
mount -t tmpfs tmpfs /root/dev/shm
# Not over /tmp: the tests themselves may lie there, and the overlay can be written everywhere.
mkdir -p /root/run/penstock
mount -t 9p -o "$nine,cache=none" exchange /root/run/penstock || poweroff -f

chroot /root /bin/sh /run/penstock/script
sync
poweroff -f
