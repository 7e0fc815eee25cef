#!/usr/bin/env bash
# Debian packages of the peers of `fabric bench broker`, for our own runs. Their default services are neither started
# nor enabled: the benchmark runs its own processes on free loopback ports with data beneath the fabric's home.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "run as root: it installs Debian packages" >&2; exit 1; }
packages=(redis-server rabbitmq-server nats-server strace)
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' >$policy # what invoke-rc.d reads as "start nothing"
  chmod 755 $policy
  trap 'rm -f $policy' EXIT
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
for service in redis-server rabbitmq-server nats-server; do
  if command -v systemctl >/dev/null && systemctl is-system-running >/dev/null 2>&1; then
    systemctl disable --now "$service" || true
  fi
done
for program in redis-server nats-server strace; do command -v $program; done
ls /usr/lib/rabbitmq/bin/rabbitmq-server
