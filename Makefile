# Everything a fresh machine needs is made by the targets themselves: `make demo` and `make test` work on a fresh clone.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
APT := $(if $(shell command -v apt-get),$(if $(filter 0,$(shell id -u)),apt-get,$(if $(shell command -v sudo),sudo -n apt-get)))

.PHONY: help setup setup-dev setup-fleet weights system chart-tools demo serve test test-failed test-fleet test-lowest check lock release \
	audit bench soak clean

help:
	@echo "make demo    set up, fetch and verify the embedded model, show live captions from real speech"
	@echo "make serve   start the server; the page is at http://127.0.0.1:8000"
	@echo "make test    set up, then run the whole test suite"
	@echo "make test-fleet   set up Ray too, then run the tests that need a cluster or several processes"
	@echo "make test-lowest  run the gateway's tests with the oldest versions that pyproject.toml allows"
	@echo "make check   lint and type-check"
	@echo "make lock    resolve what the image installs, with hashes, into requirements.lock and requirements-cpu.lock"
	@echo "make release build sdist, wheel, bill of materials and checksums into dist/"
	@echo "make audit   look for known vulnerabilities in what pyproject.toml allows and the image installs"
	@echo "make chart-tools  fetch helm and the schemas of Kubernetes, which the tests of the Helm chart use"
	@echo "make bench   run the quick benchmarks, which need neither a GPU nor recordings"
	@echo "make soak    hours of sessions in compressed time, a million fuzzed messages"

# The stamps depend on pyproject.toml, so a changed dependency installs at the next target. The demo installs what the
# product needs and nothing else, and leaves compiling to the first import: both make the first captions come sooner.
setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev
setup-fleet: $(VENV)/.installed-fleet

# deploy/install.py says what it fetches and why, and shows the progress. It uses uv if that is there or can be fetched, and
# pip otherwise (`make demo INSTALLER=pip`). On x86 the package index has torch with CUDA only, gigabytes of it. Where there
# is no NVIDIA driver and PyTorch's index of CPU builds answers, torch comes from there.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALLER ?=
install = $(PYTHON) deploy/install.py $(VENV) --cpu-index $(TORCH_CPU_INDEX) $(if $(INSTALLER),--installer $(INSTALLER))
wants_cpu_torch = test "$$(uname -m)" = x86_64 && ! command -v nvidia-smi >/dev/null && $(PYTHON) -c \
	"import urllib.request; urllib.request.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=5)" 2>/dev/null

$(VENV)/.installed: pyproject.toml
	@$(install)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(install) --extra dev
	@touch $@

$(VENV)/.installed-fleet: $(VENV)/.installed-dev
	@$(install) --extra dev,fleet || { \
		echo "the extra tickertape[fleet] (Ray) could not be installed here: the tests of a fleet cannot run"; exit 1; }
	@touch $@

# Weights and a recording of real speech, each checked against its digest; already there: nothing is fetched.
weights: setup
	$(BIN)/tickertape pull

# helm and the schemas of Kubernetes, for the tests of the chart. helm's binary is for x86; elsewhere qemu runs it.
CHART := .venv-chart
chart-tools: $(CHART)/.installed
$(CHART)/.installed: tests/deploy/chart_tools.py
	$(PYTHON) tests/deploy/chart_tools.py $(CHART)
	@test "$$(uname -m)" = x86_64 || command -v qemu-x86_64-static >/dev/null || test -z "$(APT)" \
		|| $(APT) install -y -qq --no-install-recommends qemu-user-static >/dev/null
	touch $@

# The browser tests need two browsers, the audio tests a voice, the tests of streams ffmpeg. Where one cannot be
# installed, its tests say so and skip.
system:
	@missing=""; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v firefox-esr >/dev/null || command -v firefox >/dev/null || missing="$$missing firefox-esr"; \
	command -v espeak-ng >/dev/null || missing="$$missing espeak-ng"; \
	command -v ffmpeg >/dev/null || missing="$$missing ffmpeg"; \
	if [ -n "$$missing" ] && [ -n "$(APT)" ]; then \
		echo "installing$$missing"; \
		{ $(APT) update -qq && $(APT) install -y -qq --no-install-recommends $$missing; } >/dev/null 2>&1 \
			|| echo "could not install$$missing; the tests that need them will be skipped"; \
	fi

# The demo fetches the weights itself, and shows at its end how long each part took.
demo: setup
	@took=$$(cat $(VENV)/seconds 2>/dev/null); rm -f $(VENV)/seconds; \
	set -x; $(BIN)/tickertape demo $${took:+--installed-in $$took}

serve: weights
	$(BIN)/tickertape serve

# The tests start hundreds of processes. Where no bytecode may be written, each of them compiles all that it imports: the
# gateway's modules take 2.4 s of processor time then, and 0.8 s otherwise.
test test-failed test-fleet test-lowest soak: export PYTHONDONTWRITEBYTECODE :=

# Most tests wait for something rather than compute, so four processes are faster than two, on two cores as well. Files
# are run in the order of their folders: the long ones are not the last.
test: setup-dev weights system
	$(BIN)/tickertape pull moonshine-tiny
	$(MAKE) chart-tools || echo "the tests with helm are skipped"
	$(BIN)/tickertape pull speakers || echo "the tests with speaker embeddings are skipped"
	$(BIN)/tickertape pull turn-detector || echo "the tests with the turn detector are skipped"
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# What failed in the last run once more, with nothing beside it: says whether it was the code or a busy machine.
test-failed:
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# One cluster for the whole run, and no second process beside it: two cores are few.
test-fleet: setup-fleet
	$(BIN)/python -m pytest -m "ray or fleet" tests/fleet tests/e2e/test_fleet_processes.py tests/benchmarks

# The oldest version of each direct dependency that pyproject.toml allows, in an environment of its own. What the gateway
# depends on through others and what matters to it (h11, anyio) is a direct dependency for this reason. Test tools are
# the newest. uv is the installer that can resolve to the lowest versions.
LOWEST := .venv-lowest
UV := .venv-uv/bin/uv
# Runs several servers, which the tests of the gateway have done already, or needs packages of others.
NOT_LOWEST := --ignore tests/e2e/test_bench.py --ignore tests/e2e/test_examples.py --ignore tests/e2e/test_ecosystem.py

$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/pip install --quiet 'uv>=0.9,<1'

$(LOWEST)/.installed: pyproject.toml $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(LOWEST)
	@if $(wants_cpu_torch); then torch="--torch-backend cpu"; fi; set -x; \
	$(UV) pip compile --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --no-annotate --no-header $$torch \
		pyproject.toml --output-file $(LOWEST)/lowest.txt && \
	$(UV) pip install --quiet --python $(LOWEST)/bin/python $$torch --constraints $(LOWEST)/lowest.txt --editable '.[dev]'
	touch $@

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/tickertape pull moonshine-tiny sample-two-cities
	$(LOWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile -p no:cacheprovider $(NOT_LOWEST) \
		tests/test_dependencies.py tests/realtime tests/audio tests/engine/boundary tests/e2e
	$(LOWEST)/bin/python -m pytest -m parsers -p no:cacheprovider tests/attacks

# For Linux on x86-64 and arm64, with the Python of the image: requirements.lock with CUDA on x86-64, requirements-cpu.lock
# without. `make lock UPGRADE=--upgrade` takes newer versions.
lock: $(UV)
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate $(UPGRADE) \
		--custom-compile-command "make lock" --python-version 3.12 pyproject.toml --output-file requirements.lock
	$(PYTHON) deploy/cpu_lock.py

# sdist, wheel, bill of materials and checksums, in dist/.
release: $(UV)
	$(PYTHON) deploy/release.py $(UV) dist

# Exit code 1: a known vulnerability. Exit code 2: the database of vulnerabilities could not be asked.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --upgrade 'pip-audit>=2.9' packaging
	.venv-audit/bin/python deploy/audit.py

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev
	$(BIN)/python -m benchmarks.step_cost
	$(BIN)/python -m benchmarks.host_cost
	$(BIN)/python -m benchmarks.append_cost

soak: setup-dev weights
	$(BIN)/python -m pytest -m soak --timeout 7200

clean:
	rm -rf $(VENV) .venv-lowest .venv-uv .venv-audit .venv-chart build dist *.egg-info
