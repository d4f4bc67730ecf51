# make run    install here (.venv), get gVisor, start JupyterLab with sandboxed Python
# make test   install, lint and test
# make check  lint, types and the tests that start no sandbox, in less than a minute
# Works from a clean clone on Debian 12 and 13, as root or with sudo, and asks nothing; Ubuntu has no package chromium.
# A second run installs nothing again unless pyproject.toml has changed.

BIN  := .venv/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# The first Python that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# Only this folder is shown to the sandboxes of `make run`, never the source tree.
NOTEBOOKS ?= $(CURDIR)/notebooks
ARGS ?=
RUN_CONFIG := $(CURDIR)/.venv/etc/make-run
# Processes that `make test` divides the test files among: one more than cores, as many tests wait.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
# Tests that start no sandbox and no server.
UNIT := $(addprefix tests/,models policy egress guest storage/audit storage/files storage/snapshots sandbox/link \
	sandbox/test_tokens.py runtimes/test_oci.py runtimes/test_rootfs.py runtimes/docker/test_config.py \
	test_documentation.py test_linux.py test_repository.py)
APT := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get

.PHONY: help run test check lint format bench docs setup packages clean
help:
	@sed -n '1,5s/^# //p' Makefile

# Install the packages of $(1), lines of "command package", whose command is missing.
define install_missing
	missing=""; while read -r command package; do \
		case "$$command" in ''|'#'*) continue;; esac; \
		command -v "$$command" >/dev/null 2>&1 || missing="$$missing $$package"; \
	done < $(1); \
	if [ -n "$$missing" ]; then \
		echo "== Installing with apt:$$missing"; \
		$(APT) update -q && $(APT) install -qy --no-install-recommends $$missing; \
	fi
endef

.venv/bin/python:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		echo "== Installing with apt: python3-venv"; \
		$(APT) update -q && $(APT) install -qy --no-install-recommends python3-venv; \
	fi
	@echo "== Making a virtual environment in .venv"
	@$(or $(PYTHON),python3) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml labextension/dist/package.json $(wildcard jupyter_agentbox/client/_async/*.py)
	@echo "== Installing jupyter_agentbox and what its tests need into .venv; the first time takes some minutes"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[test,dev]'
	@touch $@

# Idempotent and quick where runsc is there already; says what it does before it does it.
setup: .venv/installed
	@echo "== jupyter agentbox setup: gets gVisor (runsc) if this machine has none"
	@$(BIN)/jupyter agentbox setup

# Enforced in a directory of its own: the tests' servers use the same environment. The person who runs it is the
# administrator, and may allow hosts in JupyterLab.
run: .venv/installed
	@echo "== jupyter agentbox setup --enforce: gets gVisor (runsc) if this machine has none; sandboxed kernels only"
	@$(BIN)/jupyter agentbox setup --enforce --config-dir="$(RUN_CONFIG)"
	@mkdir -p $(NOTEBOOKS)
	@echo "== Starting JupyterLab on $(NOTEBOOKS); Python runs in gVisor. The address, with its token, comes below."
	@PATH="$(CURDIR)/$(BIN):$$PATH" JUPYTER_CONFIG_PATH="$(RUN_CONFIG)$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
		$(BIN)/jupyter lab --no-browser $(if $(SUDO),,--allow-root) --ServerApp.root_dir="$(NOTEBOOKS)" \
		--Policy.user_may_allow='*:*' $(ARGS)

packages:
	@$(call install_missing,tests/packages.txt)
	@# Up to Debian 12 docker.io brings its client, BuildKit within; from 13 on both are packages that 12 does not know.
	-@PATH="/usr/bin:$$PATH" DOCKER_BUILDKIT=1 docker build --help >/dev/null 2>&1 || { \
		echo "== Installing with apt: docker-cli docker-buildx"; \
		$(APT) update -q && $(APT) install -qy --no-install-recommends docker-cli docker-buildx; }

lint: .venv/installed
	@echo "== Lint: ruff, mypy, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports

format: .venv/installed
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

test: packages setup lint
	@echo "== Tests, on real gVisor, in $(WORKERS) processes"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: lint
	@echo "== Tests that start no sandbox and need no network, in $(WORKERS) processes"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not network" $(UNIT) $(ARGS)

bench: setup
	@echo "== Benchmarks: bare ipykernel = 1.0, both in one run"
	@$(BIN)/python -m benchmarks $(ARGS)

docs: .venv/installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python -m sphinx -W -q -b html docs build/docs

clean:
	rm -rf .venv build dist
