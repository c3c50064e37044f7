# make build   environment in .venv, package installed, sm86 artifacts built
# make test    formatting, lint, types, tests; what CI runs
# make soak    the slow runs: 20 000 mutated artifact sets, none of which may be accepted
# make inspect the budgets of every kernel, held against its machine code; no GPU
# make gpu     the tests and measurements that need an NVIDIA GPU and a CUDA build of torch
# make evidence  fails if a recorded GPU result no longer matches what the sources compile to
# make lint, make format, make clean

PYTHON ?= python3
# Name of the folder that `make gpu` writes its results to.
GPU ?= h200
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# All of them, also those that are built on request.
KERNELS := gemv gemv_any gemv_mma
NATIVE := CMakeLists.txt $(wildcard loader/native/*)

.PHONY: build test soak inspect lint gpu evidence format clean

build: $(STAMP)
	$(BIN)/sonata-aot build --arch sm86

test: lint inspect
	$(BIN)/pytest -n auto --dist worksteal -m "not gpu"
	$(BIN)/python -m benchmarks.figures --check
	$(BIN)/python -m benchmarks.evidence --report

soak: $(STAMP)
	MUTATIONS=20000 $(BIN)/pytest -n auto --dist worksteal tests/artifacts/test_mutations.py

inspect: $(STAMP)
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(BIN)/sonata-aot build --arch sm86 --arch sm90 $(KERNELS:%=--kernel %) --out "$$directory" && \
	$(BIN)/sonata-aot inspect --check "$$directory"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

gpu: $(STAMP)
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu: torch %s has no CUDA device" % torch.__version__)'
	$(BIN)/sonata-aot build --arch sm86 --arch sm90
	$(BIN)/pytest -m gpu
	$(BIN)/python -m examples.decode_gemv
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(BIN)/sonata-aot build --arch sm86 --arch sm90 --kernel gemv --kernel read --out "$$directory/artifacts" && \
	$(BIN)/sonata-aot bench gemv "$$directory/artifacts" --arch sm86 --arch sm90 --json "$$directory/gemv.json" && \
	$(BIN)/python -m benchmarks.results "$$directory/gemv.json" benchmarks/results/$(GPU)/gemv.json
	$(BIN)/python -m benchmarks.first_call --json benchmarks/results/$(GPU)/first_call.json
	$(BIN)/python -m benchmarks.figures

evidence: $(STAMP)
	$(BIN)/python -m benchmarks.evidence

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch is pinned in constraints.txt; see there.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
