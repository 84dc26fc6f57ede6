#!/usr/bin/env bash
# Everything, on a bare Debian machine, as root: installs what the tests need, checks, and tests under the race detector. KIRI_MUST=1 turns
# a test that lacks an ability into a failure; KIRI_MUST= lets it skip and say why. Arguments go to go test: scripts/test.sh ./internal/wire
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
	echo "make test: needs root, because containers are made for real" >&2
	exit 1
fi
export KIRI_MUST=${KIRI_MUST-1}
step() { printf '\n== %s\n' "$*"; }

step "packages"
declare -A provides=(
	[busybox-static]=/bin/busybox [docker-registry]=/usr/bin/docker-registry [iproute2]=/sbin/ip [nftables]=/usr/sbin/nft
	[gcc]=/usr/bin/gcc [libc6-dev]=/usr/include/stdio.h
)
missing=()
for package in "${!provides[@]}"; do
	[ -e "${provides[$package]}" ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
	echo "installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	# No service of these packages is wanted, only the programs: this policy keeps apt from starting any.
	policy=/usr/sbin/policy-rc.d
	made=
	if [ ! -e $policy ]; then
		printf '#!/bin/sh\nexit 101\n' >$policy
		chmod 755 $policy
		made=1
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT
	fi
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
	if [ -n "$made" ]; then
		rm -f $policy
		trap - EXIT
	fi
fi

# The clients are built from the Go module proxy: the distribution's are years old.
tools=$PWD/bin/tools
mkdir -p "$tools"
if ! docker --version 2>/dev/null | grep -qE 'version (2[89]|[3-9][0-9])\.'; then
	step "docker CLI"
	[ -x "$tools/docker" ] || (cd tools/docker && CGO_ENABLED=0 go build -trimpath \
		-ldflags '-s -w -X github.com/docker/cli/cli/version.Version=28.5.2' -o "$tools/docker" github.com/docker/cli/cmd/docker)
fi
if ! command -v docker-compose >/dev/null; then
	step "docker compose"
	[ -x "$tools/docker-compose" ] || (cd tools/compose && CGO_ENABLED=0 go build -trimpath \
		-ldflags '-s -w -X github.com/docker/compose/v5/internal.Version=v5.6.0' -o "$tools/docker-compose" github.com/docker/compose/v5/cmd)
fi
export PATH=$tools:$PATH
docker --version
docker-compose version

bash scripts/check.sh

step "go test -race"
# Two packages at a time: whole containers, registries and daemons are under test, and the machine may have two cores.
CGO_ENABLED=1 go test -race -p 2 -timeout 60m "${@:-./...}"
