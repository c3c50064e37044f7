# make build   environment in .venv, package installed, sm86 artifacts built
# make test    formatting, lint, types, tests; what CI runs
# make soak    the slow runs: 20 000 mutated artifact sets, 200 killed builds, builds that race; the result
#              goes to benchmarks/results/soak.json, to be committed
# make inspect the budgets, held against the machine code of all declared variants; no GPU
# make gpu     the tests and measurements that need an NVIDIA GPU and a CUDA build of torch
# make evidence  fails if a recorded result, of a GPU or of `make soak`, is not of today's sources
# make docs    what docs/cli.md says of the commands, made from them
# make wheels  wheels and an sdist to publish, in dist; ARCHS, WHEEL_PYTHONS and MACHINE say for what
# make lint, make format, make clean

# Else each of the many processes that tests start would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# Name of the folder that `make gpu` writes its results to.
GPU ?= h200
RESULTS := benchmarks/results/$(GPU)
MEASURED := build/measured
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard loader/native/*)

bench = $(BIN)/sonata-aot bench gemv $(MEASURED)/all --arch sm90 --arch sm86 $(2) --json $(MEASURED)/$(1).json && \
	$(BIN)/python -m benchmarks.results $(MEASURED)/$(1).json $(RESULTS)/$(1).json

# The same for the scan; what calls get, and `read`. mamba_ssm must be installed beside it.
scan = $(BIN)/sonata-aot bench ssd $(MEASURED)/$(2) --arch sm90 --arch sm86 $(3) --json $(MEASURED)/$(1).json && \
	$(BIN)/python -m benchmarks.results $(MEASURED)/$(1).json $(RESULTS)/$(1).json

# For what `make wheels` makes wheels: architectures, Pythons (3.11 has a wheel of its own, 3.12's is
# for all from it on) and processor.
ARCHS ?= sm86
WHEEL_PYTHONS ?= python3.11 python3.12
MACHINE ?= x86_64
RELEASE := build/release-$(MACHINE)
required = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])'

.PHONY: build test soak docs inspect lint gpu evidence wheels format clean

build: $(STAMP)
	$(BIN)/sonata-aot build --arch sm86

# The tests compile everything that is built by default, from nothing, and hold its machine code
# against the budgets; the report on the evidence finds it in their cache.
test: lint
	cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	SONATA_TEST_CACHE="$$cache" $(BIN)/pytest -n auto --dist worksteal -m "not gpu" && \
	$(BIN)/python -m benchmarks.figures --check && \
	$(BIN)/python -m benchmarks.soak --report && \
	SONATA_AOT_CACHE_DIR="$$cache" $(BIN)/python -m benchmarks.evidence --report

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak

inspect: $(STAMP)
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(BIN)/sonata-aot build --all --arch sm86 --arch sm90 --out "$$directory" && \
	$(BIN)/sonata-aot inspect --check "$$directory"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

gpu: $(STAMP)
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu: torch %s has no CUDA device" % torch.__version__)'
	$(BIN)/sonata-aot build --all --arch sm86 --arch sm90 --out $(MEASURED)/all
	$(BIN)/sonata-aot build --arch sm86 --arch sm90 --out $(MEASURED)/default
	SONATA_AOT_DIR=$(MEASURED)/all $(BIN)/pytest -m gpu
	SONATA_AOT_DIR=$(MEASURED)/default $(BIN)/python -m examples.first_run
	SONATA_AOT_DIR=$(MEASURED)/default $(BIN)/python -m examples.decode_gemv
	$(call bench,gemv,)
	$(call bench,gemv_rows,--m 3 --m 4 --m 5 --m 6 --m 7 --m 8)
	$(call bench,gemv_f16,--dtype f16)
	$(call bench,gemv_bias,--bias)
	$(BIN)/python -m benchmarks.gemv_chain $(MEASURED)/all --json $(RESULTS)/gemv_chain.json
	$(BIN)/python -m benchmarks.launch $(MEASURED)/default --json $(RESULTS)/launch.json
	$(BIN)/python -m benchmarks.decode_step $(MEASURED)/all --json $(RESULTS)/decode_step.json
	$(BIN)/python -m benchmarks.mixed_load $(MEASURED)/default --json $(RESULTS)/mixed_load.json
	$(BIN)/python -m benchmarks.decode_graph $(MEASURED)/default --json $(RESULTS)/decode_graph.json
	$(BIN)/python -m benchmarks.first_call $(MEASURED)/default --json $(RESULTS)/first_call.json
	$(call scan,ssd,all,--picture $(MEASURED)/ssd.svg)
	$(call scan,ssd_first_call,default,--first-call)
	$(BIN)/python -m benchmarks.sanitizer $(MEASURED)/default --json $(RESULTS)/sanitizer.json
	$(BIN)/python -m benchmarks.figures

evidence: $(STAMP)
	$(BIN)/python -m benchmarks.soak --check
	$(BIN)/python -m benchmarks.evidence

docs: $(STAMP)
	$(BIN)/python -m sonata_aot.aot.reference docs/cli.md

# ziglang's compiler has the headers of every glibc: the launcher needs no newer one than it is told.
# It builds for another processor, too, in environments made before that is said: else pip would
# fetch CMake for that one. Each wheel is built out of the tree and out of the sdist, in another
# folder, and must be the same.
wheels: $(STAMP)
	$(BIN)/python -m pip install --quiet $$($(call required,release))
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	for kind in cc c++; do \
		printf '#!/bin/sh\nexec "%s" -m ziglang %s -target %s-linux-gnu.2.28 "$$@"\n' \
			"$(CURDIR)/$(BIN)/python" $$kind $(MACHINE) > $(RELEASE)/$$kind && chmod +x $(RELEASE)/$$kind || exit; \
	done
	$(BIN)/python -m build --sdist --outdir $(RELEASE) && mkdir -p dist && cp $(RELEASE)/*.tar.gz dist
	mkdir $(RELEASE)/sdist && tar --extract --file $(RELEASE)/*.tar.gz --directory $(RELEASE)/sdist --strip-components 1
	for python in $(WHEEL_PYTHONS); do \
		tools="$(CURDIR)/$(RELEASE)/$$(basename $$python)" && $$python -m venv "$$tools" && \
		"$$tools/bin/python" -m pip install --quiet $$($(call required,launcher)) || exit; \
		for out in tree sdist; do \
			source=. && test $$out = tree || source=$(RELEASE)/sdist; \
			PATH="$$tools/bin:$$PATH" CC="$(CURDIR)/$(RELEASE)/cc" CXX="$(CURDIR)/$(RELEASE)/c++" \
				_PYTHON_HOST_PLATFORM=linux-$(MACHINE) "$$tools/bin/python" -m pip wheel \
				--no-build-isolation --no-deps --wheel-dir $(RELEASE)/of-$$out $$source || exit; \
		done; \
	done
	for base in $(RELEASE)/of-tree/*.whl; do \
		cmp $$base $(RELEASE)/of-sdist/$${base##*/} && \
		$(BIN)/sonata-aot wheel --quiet --base $$base $(ARCHS:%=--arch=%) --platform manylinux_2_28_$(MACHINE) --out dist || exit; \
	done

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
