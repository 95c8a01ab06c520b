#!/bin/sh
# Runs in the guest: create a soft-RoCE device on a dummy network card, then run "$@".
# The card eth0 has large frames, so that a packet carries 4096 bytes.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
ip link set lo up
ip link add eth0 type dummy
ip link set eth0 mtu 9000 up
ip addr add 10.77.0.1/24 dev eth0
rdma link add rxe0 type rxe netdev eth0
ulimit -l unlimited
exec "$@"
