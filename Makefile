# The main targets are `make demo` and `make test`. Each installs its dependencies into .venv only.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
KILLS ?= 1000
# Twice the processors of CI: tests wait for signals and processes as long as they compute.
WORKERS ?= 4
# Tests with time limits. They do not run next to the Spark tests, which use all processors.
CLOCKED := $(addprefix tests/,abuse broker client console consumers crash dedupe faults faulty_network postgres processes server transports worker)
# Use the certificates of the system, as pip does.
export UV_SYSTEM_CERTS := 1
# With it each of a thousand short processes would compile anew what it imports, which takes longer than its work.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test compiled check lint types abuse crash powerloss replicas cluster lake-kills bench docs lock clean

demo: .venv/ready-for-spark
	@$(BIN)/headwater demo

# The files of this run stay in memory if the machine has a tmpfs of 4 GiB for them: on a disk it waits for thousands of
# fsyncs. What a power cut leaves is proved on a simulated disk, and a killed process leaves the same on either.
test: export TMPDIR := $(or $(shell df -Pk /dev/shm 2>&1 | awk '$$1 == "tmpfs" && $$4 >= 4194304 {print $$6}'),$(TMPDIR))
test: .venv/ready-for-tests lint
	@$(MAKE) --no-print-directory --jobs 2 types compiled
	$(call run-tests,$(addprefix --ignore=,$(CLOCKED)))
	$(call run-tests,$(CLOCKED))

# Tests that fail among thousands are run once more, alone. A test that passes only then is listed above as FAILED: it
# depends on the load of the machine, and has to be fixed.
define run-tests
$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(1) || $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none $(1)
endef

# In a new clone each worker would compile all tests, and all that they import, at the same time. It tells nothing: what
# cannot be imported fails in the tests.
compiled: .venv/ready-for-tests
	-@$(BIN)/python -m pytest --collect-only -qqq > /dev/null

check: lint types

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_sync.py --check

types: .venv/ready-for-tests
	$(BIN)/mypy

# Attacks on an otherwise idle machine, one by one and all at once, then a million fuzzed frames and thousands of
# connections.
abuse: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/abuse -q -s -m "long or not long"
	$(BIN)/python -m pytest tests/server -q -s -m long --timeout=0

crash: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/crash -q -s --timeout=0 --kills=$(KILLS)

powerloss: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/powerloss -q -s --timeout=0 --every-cut

# Replication's long tests: databases of more than 1 GiB, a hundred kills.
replicas: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/replication -q -m long --timeout=900

# The pipeline's long tests, then its suite again through Spark Connect and on a cluster of three daemons.
cluster: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/pipeline -q -m long --ignore=tests/pipeline/test_kills.py
	$(BIN)/python -m pytest tests/pipeline -q -m 'not long' --spark=connect
	$(BIN)/python -m pytest tests/pipeline -q -m 'not long' --spark=standalone

# A hundred killed runs on a disk and twenty on S3, followed by an audit of the lakes.
lake-kills: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/pipeline/test_kills.py -q -s -m long

bench: .venv/ready-for-tests
	$(BIN)/uv sync --quiet --frozen --inexact --group bench
	$(BIN)/python bench/run.py

# The pages of the reference that follow from the code, then the site, in site/. A broken link or anchor is an error.
docs: .venv/ready
	$(BIN)/uv sync --quiet --frozen --inexact --group docs
	$(BIN)/python tools/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

lock: .venv/ready
	$(BIN)/uv lock

# A venv without pip also works if Python has no ensurepip; uv then installs the versions of uv.lock.
.venv/ready: pyproject.toml uv.lock
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check 'uv>=0.9'
	$(BIN)/uv sync --quiet --frozen --inexact
	@touch $@

.venv/ready-for-spark: .venv/ready
	$(BIN)/uv sync --quiet --frozen --inexact --extra spark
	@touch $@

.venv/ready-for-tests: .venv/ready
	$(BIN)/uv sync --quiet --frozen --inexact --all-extras
	@touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
