#!/usr/bin/env bash
# Runs every fuzz target for the given time.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-20s}

for package in $(go list ./...); do
	for target in $(go test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "== $package $target"
		go test "$package" -run '^$' -fuzz "^$target\$" -fuzztime "$time"
	done
done
