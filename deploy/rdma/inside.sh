#!/bin/sh
# Runs in the guest: makes a soft-RoCE device of a dummy network card, then runs "$@".
# The card is called eth0 and has large frames so that the path carries 4096 bytes a packet.
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
