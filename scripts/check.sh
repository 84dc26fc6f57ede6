#!/usr/bin/env bash
# The checks that need nothing but Go: format, vet, staticcheck, and that everything builds where it must.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }

step "gofmt"
unformatted=$(gofmt -l cmd internal scripts)
if [ -n "$unformatted" ]; then
	printf 'gofmt -w would change:\n%s\n' "$unformatted"
	exit 1
fi

step "go vet"
go vet ./...
GOARCH=arm64 CGO_ENABLED=0 go vet ./...

step "staticcheck"
go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

step "cross-builds"
for target in linux/arm64 linux/amd64; do
	echo "$target kiri kiri-init"
	GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0 go build -trimpath -buildvcs=false -o /dev/null ./cmd/kiri
	GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0 go build -trimpath -buildvcs=false -o /dev/null ./cmd/kiri-init
done
for target in darwin/arm64 windows/amd64; do
	echo "$target kiri"
	GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0 go build -trimpath -buildvcs=false -o /dev/null ./cmd/kiri
done
