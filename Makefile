# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv and nowhere else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
KILLS ?= 1000
# What is tested against the clock, and so not beside a Spark that takes all processors.
CLOCKED := $(addprefix tests/,abuse broker client console consumers crash dedupe faults faulty_network postgres processes server transports)
# Trust the certificates that the machine trusts, as pip does.
export UV_SYSTEM_CERTS := 1

.PHONY: demo lake test check lint types abuse crash powerloss replicas cluster bench lock clean

demo: .venv/ready
	@$(BIN)/headwater demo

lake: .venv/ready-for-spark
	@rm -rf headwater-lake-demo
	@$(BIN)/headwater pipeline demo headwater-lake-demo

test: .venv/ready-for-tests check
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(addprefix --ignore=,$(CLOCKED))
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(CLOCKED)

check: lint types

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/ready-for-tests
	$(BIN)/mypy

# Attacks with the machine to themselves, each alone and all at once, and a million fuzzed frames.
abuse: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/abuse -q -s -m "long or not long"
	$(BIN)/python -m pytest tests/server/test_fuzz_frames.py -q -s -m long --timeout=0

crash: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/crash -q -s --timeout=0 --kills=$(KILLS)

powerloss: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/powerloss -q -s --timeout=0 --every-cut

# Replication's long tests: databases of more than 1 GiB, a hundred kills.
replicas: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/replication -q -m long --timeout=900

# The pipeline's long tests, then its suite again through Spark Connect and on a cluster of three daemons.
cluster: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/pipeline -q -m long
	$(BIN)/python -m pytest tests/pipeline/source tests/pipeline/sink tests/pipeline/datasets tests/pipeline/jobs -q --spark=connect
	$(BIN)/python -m pytest tests/pipeline/source tests/pipeline/sink tests/pipeline/datasets tests/pipeline/jobs -q --spark=standalone

bench: .venv/ready-for-tests
	$(BIN)/uv sync --quiet --frozen --inexact --group bench
	$(BIN)/python bench/run.py

lock: .venv/ready
	$(BIN)/uv lock

# A venv without its own pip also works where Python ships no ensurepip; uv then installs what uv.lock names.
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
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
