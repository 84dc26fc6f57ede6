# What can be done here; `make help` prints it.

PREFIX   ?= /usr/local
DESTDIR  ?=
BINDIR    = $(PREFIX)/bin
UNITDIR   = $(PREFIX)/lib/systemd/system
SYSUSERS  = $(PREFIX)/lib/sysusers.d
FUZZTIME ?= 20s

# The checkout may belong to somebody else than root, who runs make; the directory is trusted here because its Makefile runs already.
GIT      := git -c safe.directory=$(CURDIR)
VERSION  ?= $(shell $(GIT) describe --tags --dirty --match 'v*' 2>/dev/null || cat VERSION 2>/dev/null || echo 0.1.0-dev)
COMMIT   ?= $(shell $(GIT) rev-parse --short HEAD 2>/dev/null)
# The date of the commit, so that one commit gives one binary.
DATE     ?= $(shell $(GIT) show -s --format=%cI HEAD 2>/dev/null)

GO       ?= go
GOFLAGS_BUILD = -trimpath -buildvcs=false
LDFLAGS   = -s -w -X main.version=$(VERSION) -X main.gitCommit=$(COMMIT) -X main.buildTime=$(DATE)

export CGO_ENABLED = 0

.DEFAULT_GOAL := build
.PHONY: help build demo test check bench fuzz install uninstall clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build bin/kiri and bin/kiri-init
	$(GO) build $(GOFLAGS_BUILD) -ldflags '$(LDFLAGS)' -o bin/ ./cmd/kiri ./cmd/kiri-init

demo: build ## build, start the engine in a temporary home, run a container, say what it cost; leaves nothing
	$(GO) build $(GOFLAGS_BUILD) -ldflags '-s -w' -o bin/kiri-hello ./cmd/kiri-hello
	$(GO) build $(GOFLAGS_BUILD) -ldflags '-s -w' -o bin/kiri-demo ./scripts/demo
	exec bin/kiri-demo

test: ## install what the tests need (apt, Go module proxy), then run every check and every test, as root
	bash scripts/test.sh

check: ## only the checks that need no root: gofmt, vet, staticcheck, cross-builds
	bash scripts/check.sh

bench: build ## measure kiri, the kernel's floor and the other engines found here
	bin/kiri bench $(ARGS)

fuzz: ## run every fuzz target for FUZZTIME (20s)
	bash scripts/fuzz.sh $(FUZZTIME)

install: build ## install binaries, systemd units and the group kiri (PREFIX, DESTDIR)
	install -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(UNITDIR) $(DESTDIR)$(SYSUSERS)
	install -m 0755 bin/kiri bin/kiri-init $(DESTDIR)$(BINDIR)/
	sed 's|@BINDIR@|$(BINDIR)|g' packaging/kiri.service > $(DESTDIR)$(UNITDIR)/kiri.service
	install -m 0644 packaging/kiri.socket $(DESTDIR)$(UNITDIR)/kiri.socket
	install -m 0644 packaging/kiri.sysusers $(DESTDIR)$(SYSUSERS)/kiri.conf
	@if [ -z "$(DESTDIR)" ]; then sh scripts/installed.sh; fi

uninstall: ## remove what install put there; data in /var/lib/kiri and the group stay
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl disable --now kiri.socket kiri.service || true; fi
	rm -f $(DESTDIR)$(BINDIR)/kiri $(DESTDIR)$(BINDIR)/kiri-init
	rm -f $(DESTDIR)$(UNITDIR)/kiri.service $(DESTDIR)$(UNITDIR)/kiri.socket $(DESTDIR)$(SYSUSERS)/kiri.conf
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

clean: ## remove bin/
	rm -rf bin
