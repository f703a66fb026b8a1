# Every target does the whole set-up itself, on a machine that has nothing but Python >= 3.11:
#   make demo    two programs: an array through three actors without a copy, then a parameter server that trains
#   make check   lint, types and the core's quick tests, in a minute
#   make quick   all quick tests, on uvloop
#   make test-pythons   the quick tests on other versions of Python that are here, pyenv's or the path's (PYTHONS='3.12 3.14')
#   make test    lint, types and all tests, on uvloop and on asyncio
#   make docs    the site of the documentation in docs/_build/html, with every Python block run and every link followed
#   make sanitize   of these what exercises the native parts, built with sanitizers, and changed frames for a minute
#   make simulate SEEDS=1:200   runs of a simulated cluster under faults, each decided by one number
#   make bench   the benchmarks
#   make dist    the sdist and the wheel of this interpreter, in dist/; make wheels: manylinux wheels, also for aarch64 (WHEELS='3.12 3.13')
#   make image   the container image of what is in dist/, with buildah (Debian)
#   make dist-check   what is in dist/, installed and run in empty environments, as a user does
#   make test-engines   runs under real launchers (Open MPI, MPICH, Slurm, Ray, ssh), heads' logs in a real etcd, and
#                manifests before Kubernetes's schemas
#   make test-rdma   of these the ones that need an RDMA device, in virtual machines that have one (Debian on x86-64)
# PY=python3.12 chooses the interpreter, VENV=dir the environment, ARGS='-k name' goes to pytest or the program.

SHELL := /bin/bash
PY ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
# What goes to which process is said in tests/conftest.py. All tests go to one process more than a small machine has
# processors, as they wait for processes of theirs, and two would leave a quarter of it idle. The quick ones wait less.
SPREAD := --no-loadscope-reorder
# Tests whose guests have the machine to themselves: beside other tests they take twice as long, and acknowledgements
# come too late. Those of the harness boot beside other tests. The order keeps two processes busy equally long: the
# second half of the files goes to the process whose first guest ends first.
ALONE := tests/vm/test_rdma.py tests/vm/test_two_hosts.py tests/vm/test_bindings.py
# A guest has one processor, so two of them run side by side where there is memory for the largest (5 GiB), another one
# and the rest of the machine.
GUESTS = $(or $(shell awk '/^MemAvailable/ { print $$2 < 9 * 1024 * 1024 ? 1 : 2 }' /proc/meminfo 2>/dev/null),1)

# Tests that run once more in check mode, which finds arrays that change after they were passed.
CHECKED := $(addsuffix ::test_random_programs_see_what_was_passed,$(wildcard tests/promises/test_snapshots.py)) \
  $(addprefix tests/api/test_,arrays.py passing.py stream.py) $(addprefix tests/collectives/test_,direct.py \
  exchanges.py fast_path.py in_turn.py operations.py reducer.py reductions.py)

# The quick tests of the rooms that each program's calls and arrays cross. The repetitions on cards that are drawn at
# random are left to `make quick`.
SMOKE := $(addprefix tests/,api assembly hooks loading marshal native node objects objectstore rpc workers \
  transport/local transport/loopback) $(wildcard tests/test_*.py tests/transport/test_*.py) \
  --ignore tests/objectstore/test_heap_stress.py --deselect tests/rpc/test_session_conformance.py::TestMessagesOnDrawnCards

# The tests start hundreds of interpreters, and none is to compile the package anew, in a guest least of all.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := check
SEEDS ?= 1:200
PYTHONS ?= 3.12 3.13 3.14
WHEELS ?= 3.11 3.12 3.13

.PHONY: demo docs test collected test-engines engines test-rdma sanitize simulate seeds check quick bench lint setup system
.PHONY: clean smoke test-pythons dist wheels dist-check image

setup: $(STAMP)

# As root on Debian the two things that may be missing are installed: the venv module, and a C compiler once setup.py
# (the native parts) exists. Everywhere else the message says what to install. Nftables and SimGrid, too, are installed as
# root: tests between hosts use the one and those of topologies the other where it is there, and go without where it is
# not.
system:
	@command -v $(PY) >/dev/null || { echo "$(PY) not found: install Python >= 3.11 or give PY=/path/to/python" >&2; exit 1; }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$$($(PY) --version) is too old: Python >= 3.11 is needed, give PY=/path/to/python" >&2; exit 1; }
	@missing=(); \
	$(PY) -c 'import ensurepip, venv' 2>/dev/null || \
	    missing+=("python$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"); \
	if [ -f setup.py ]; then \
	    command -v cc >/dev/null || missing+=(gcc libc6-dev); \
	    $(PY) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || \
	        missing+=("python$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev"); \
	fi; \
	if [ $${#missing[@]} -gt 0 ]; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$${missing[@]}"; \
	    else \
	        echo "please install: $${missing[*]}" >&2; exit 1; \
	    fi; \
	fi
	@if [ "$$(id -u)" = 0 ] && ! command -v nft >/dev/null && command -v apt-get >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends nftables; } || \
	        echo "nftables could not be installed; tests between hosts go without" >&2; \
	fi
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -x /usr/bin/python3 ] && \
	    ! /usr/bin/python3 -c 'import simgrid' 2>/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-simgrid; } || \
	        echo "python3-simgrid could not be installed; tests that judge topologies by it are skipped" >&2; \
	fi

# The pip that comes with Python 3.11 takes twice as long as one of today. Other packages' modules are compiled when they
# are first imported, as most of them never are; the package's own are compiled here, for environments that keep no
# bytecode.
SOURCES := $(wildcard setup.py zcactor/*/*.[ch] zcactor/*/*/*.[ch])
$(STAMP): pyproject.toml $(SOURCES) | system
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e . --group test
	$(BIN)/python -m compileall -q zcactor
	@touch $(DEMO) $@

# The package and what the two programs of the demo import: an environment for a first look.
$(DEMO): pyproject.toml $(SOURCES) | system
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e . --group demo
	@touch $@

demo: $(DEMO)
	$(BIN)/python examples/quickstart.py $(ARGS)
	$(BIN)/python examples/parameter_server.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/language.py
	$(BIN)/python tools/links.py
	$(BIN)/python tools/walks.py
	$(BIN)/python tools/blocks.py
	$(BIN)/python tools/tables.py --check

# The site in docs/_build/html. `make test` does the same by tests/tools/test_docs.py.
docs: $(STAMP)
	$(BIN)/python tools/docs.py $(ARGS)

# Lint runs beside the tests, as it uses one processor and they wait for processes of theirs now and then.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint smoke

smoke: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 $(SPREAD) -m 'not slow' --loops uvloop $(SMOKE) $(ARGS)

quick: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 $(SPREAD) -m 'not slow' --loops uvloop $(ARGS)

# Each version has an environment of its own, and extension modules beside those of the others.
test-pythons:
	@failed=(); \
	for version in $(PYTHONS); do \
	    python=$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	    [ -n "$$python" ] || python=$$(command -v python$$version) || \
	        { echo "Python $$version is neither pyenv's nor on the path: its tests are skipped" >&2; continue; }; \
	    echo "$$python"; \
	    $(MAKE) --no-print-directory quick PY="$$python" VENV=build/python$$version || failed+=($$version); \
	done; \
	[ $${#failed[@]} = 0 ] || { echo "failed on Python $${failed[*]}" >&2; exit 1; }

# `prepare` waits for downloads while the set-up and lint go on. Where no virtual machine can run it says why, and so do
# the tests that are skipped. ARGS may leave no test in one of the two runs, which is status 5.
# What uses one processor has company: lint the sanitizers, and both a collection of all tests. That one leaves them
# compiled, which otherwise each process of the run would do for itself: 31 s, and 13 s where it is done. Tests wait for
# processes and leases to end, and then the seeds are played: with a tenth of a test's weight they hold no test up, and yet
# none of their turns takes so long that it counts as blocked (`simulation.command.BLOCKED`).
# The weight of those that are left after the tests is that of a test, where root says so: the machine may have company.
# They stay in the session of the tests: Linux gives each session the same share (autogroup in sched(7)), and weights count
# within one.
test: system
	@$(PY) tools/vm.py prepare & prepared=$$!; trap "kill $$prepared" INT TERM; \
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint sanitize collected; status=$$?; \
	wait $$prepared || true; exit $$status
	@mkdir -p build; set -m; nice -n 10 $(BIN)/python tools/seeds.py >build/seeds.log 2>&1 & played=$$!; set +m; \
	trap "kill -- -$$played" INT TERM; \
	(set -x; $(BIN)/python -m pytest -n 3 $(SPREAD) $(addprefix --ignore ,$(ALONE) tests/engines) $(ARGS)) || [ $$? = 5 ]; \
	status=$$?; renice -n 0 -g $$played >/dev/null 2>&1 || true; wait $$played || status=$$?; cat build/seeds.log; exit $$status
	ZCACTOR_CHECK=bytes $(BIN)/python -m pytest -n 3 $(SPREAD) --loops uvloop $(CHECKED) $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -n $(GUESTS) $(SPREAD) $(ALONE) -o faulthandler_timeout=0 $(ARGS) || [ $$? = 5 ]

collected: $(STAMP)
	@nice -n 19 $(BIN)/python -m pytest --collect-only -q >/dev/null || true

# Both extensions, built anew with the address and the undefined-behaviour sanitizer: tests/native, the paths of a session,
# the heap under NumPy, and frames that are changed at random (the seed is printed; ARGS='--seconds 600 --seed 7'). Any
# report fails, and any object of theirs that is never freed. Not here: the heap's C program, which
# tests/objectstore/test_heap_stress.py builds with sanitizers by itself, and whole programs.
sanitize: $(STAMP)
	$(BIN)/python tools/sanitize.py $(ARGS)

# SEEDS=FIRST:LAST, both included; ARGS='--json --shrink' and the like. A seed that fails prints how to repeat it.
# `make seeds` plays those of the test suite: a hundred fixed ones, and fifty that the commit's hash draws.
simulate: $(STAMP)
	$(BIN)/python -m simulation --seeds $(SEEDS) --jobs 2 $(ARGS)

seeds: $(STAMP)
	$(BIN)/python tools/seeds.py $(ARGS)

test-engines: $(STAMP) engines
	@$(BIN)/python -c 'import kubernetes_validate, kmock' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check kubernetes-validate kmock || \
	    echo "kubernetes-validate and kmock could not be installed; tests of manifests are skipped" >&2
	$(BIN)/python -m pytest -n 2 $(SPREAD) tests/engines $(ARGS)

# As root on Debian the engines are installed, without starting their services: tests start daemons of their own, and
# are skipped where one is missing. Ray is a wheel, of 280 MB installed.
engines: $(STAMP)
	@missing=(); \
	for each in mpirun.openmpi:openmpi-bin mpiexec.hydra:mpich munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client \
	    kubectl:kubernetes-client etcd:etcd-server sshd:openssh-server ssh:openssh-client; do \
	    PATH="$$PATH:/usr/sbin" command -v "$${each%%:*}" >/dev/null || missing+=("$${each##*:}"); \
	done; \
	if [ $${#missing[@]} -gt 0 ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    policy=/usr/sbin/policy-rc.d; made=; \
	    [ -e $$policy ] || { printf '#!/bin/sh\nexit 101\n' > $$policy && chmod +x $$policy && made=yes; }; \
	    { apt-get update -qq && \
	      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$${missing[@]}"; } || \
	        echo "$${missing[*]} could not be installed; tests under them are skipped" >&2; \
	    [ -z "$$made" ] || rm -f $$policy; \
	fi
	@$(BIN)/python -c 'import ray, submitit' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray,slurm]' || \
	    echo "ray and submitit could not be installed; tests with them are skipped" >&2

test-rdma: $(STAMP)
	$(BIN)/python tools/vm.py prepare
	$(BIN)/python -m pytest -n $(GUESTS) $(SPREAD) $(ALONE) $(filter-out $(ALONE),$(wildcard tests/vm/test_*.py)) -o faulthandler_timeout=0 $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	$(BIN)/python -m benchmarks $(ARGS)

dist: $(STAMP)
	$(BIN)/python tools/dist.py

wheels: $(STAMP)
	$(BIN)/python tools/dist.py --manylinux $(WHEELS)

dist-check: $(STAMP)
	$(BIN)/python tools/dist_check.py $(ARGS)

# Root on Debian gets what is missing.
image: $(STAMP)
	@command -v buildah mmdebstrap >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends buildah mmdebstrap; }
	$(BIN)/python tools/image.py $(ARGS)

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find zcactor simulation tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
