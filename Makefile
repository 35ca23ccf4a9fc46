# `make ladder` and `make test` set up everything they need, once, in $(VENV), GPU or not.
# `make test NO_VENV=1 PYTHON=python3` uses an interpreter that has the packages already.

VENV ?= .venv
# The first Python that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& echo $$python && break; done)
# CuPy and NVRTC of the driver's CUDA generation: 12 where nvidia-smi says so, otherwise 13.
DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null \
	| sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
EXTRA ?= $(if $(filter 12,$(DRIVER_CUDA)),cuda12,cuda13)
# Test workers: one for a core, each with its own context where there is a device.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 16 ? $(CORES) : 16)))
# Kernels that tests compile are kept for later runs of every checkout of this user: their sources
# decide which one is found. All of them have room.
USER_CACHE := $(or $(XDG_CACHE_HOME),$(addsuffix /.cache,$(HOME)),$(CURDIR)/.cache)
TEST_CACHE ?= $(USER_CACHE)/cupyattn-tests
test-quick test-slow test-interop: export CUPYATTN_CACHE_SIZE ?= 4GiB

ifdef NO_VENV
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-$(EXTRA)
endif

# Other projects build one kernel by these variables. Here no kernel is built beforehand.
ifeq ($(origin KERNEL),command line)
$(error KERNEL=$(KERNEL) builds nothing, as each kernel is compiled when it is first called: \
	run "cupyattn profile $(or $(KERNEL),fa)" to profile it)
endif
ifeq ($(origin NVCC_ARCH),command line)
$(error NVCC_ARCH=$(NVCC_ARCH) has no effect, as kernels are compiled for the device that runs \
	them: "cupyattn cache --warm fa_tc:hd128:fp16 --arch sm_$(NVCC_ARCH)" compiles one beforehand)
endif

# The wheel has a command but no module to run with -m, and the command may not be on the PATH.
CLANG_FORMAT := $(RUN) -c 'from clang_format import clang_format; clang_format()'
KERNELS := $(shell find kernels_cu -name '*.cu' -o -name '*.cuh')

# Tests are rewritten and compiled to bytecode once, not in every worker of every run.
unexport PYTHONDONTWRITEBYTECODE
# The checkout is what runs, whatever is installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: ladder test test-quick test-slow test-interop test-browser test-site test-wheel docs lint setup clean

ladder: $(READY)
	$(RUN) -m cupyattn ladder

test: lint test-quick

PYTEST := CUPYATTN_CACHE_DIR="$(TEST_CACHE)" $(RUN) -m pytest -n $(WORKERS) --dist worksteal
# What takes more CPU time than a quick test may is run twice more, then it fails.
QUICK := --reruns 2 --only-rerun OverBudget -m "not slow"

test-quick: $(READY)
	$(PYTEST) $(QUICK)

# What `test` leaves out for its length: further variants, types and combinations, interpreted.
# SLOW_TESTS="tests/quant tests/plans" runs those of some folders; a folder may have none.
SLOW_TESTS ?= tests
test-slow: $(READY)
	$(PYTEST) -m slow --ignore=tests/docs/test_packaging.py \
		--ignore=tests/docs/test_site.py $(SLOW_TESTS) || test $$? = 5

# What torch, JAX and diffusers do with cupyattn, and other readers with its checkpoints: without
# them these tests are skipped. SLOW= runs those of every model family, too.
SLOW ?= $(QUICK)
# Tests know private modules of diffusers and PEFT by name, hence those versions.
FRAMEWORKS ?= torch jax diffusers~=0.42.1 transformers accelerate compressed-tensors peft~=0.21.2
ifdef NO_VENV
FRAMEWORKS_READY :=
BROWSER_READY :=
DOCS_READY :=
else
FRAMEWORKS_READY := $(VENV)/.ready-frameworks
DOCS_READY := $(VENV)/.ready-docs
BROWSER_READY := $(VENV)/.ready-browser
endif

test-interop: $(FRAMEWORKS_READY)
	$(PYTEST) $(SLOW) tests/interop tests/docs/test_examples.py
	$(PYTEST) -m frameworks tests/checkpoints tests/diffusion tests/docs tests/experiments tests/problem tests/testing

# The site is built anew, warnings as errors, and looks for nothing in a network.
test-site: $(DOCS_READY)
	$(RUN) -m pytest -m slow tests/docs/test_site.py

# The report and the site in Chromium, at the widths of phones and of a desk, light and dark.
test-browser: $(BROWSER_READY) $(DOCS_READY)
	$(RUN) -m pytest tests/cli/test_report_browser.py tests/docs/test_site_browser.py

# Builds sdist and wheel, installs each with the core's dependencies alone, runs it elsewhere.
test-wheel: $(READY)
	$(RUN) -m pytest -m slow tests/docs/test_packaging.py

# The documentation site, in build/docs/html; a warning is an error.
docs: $(DOCS_READY)
	$(RUN) -m docs.build_site

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m codespell_lib cupyattn kernels_cu docs tests experiments examples *.md
	$(CLANG_FORMAT) --dry-run -Werror $(KERNELS)

setup: $(READY)

$(VENV)/.ready-$(EXTRA): setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "cupyattn needs Python 3.10 or later: none was found on the" \
		"PATH; name one with make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "cupyattn needs Python 3.10 or later, $(PYTHON) is" \
		"$$($(PYTHON) -V 2>&1); name another with make PYTHON=/path/to/python3." >&2; exit 1; }
	@echo "Setting up $(VENV) with cupyattn[$(EXTRA),cli,dev], once (a few minutes)"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "python -m venv failed: on Debian and Ubuntu," \
		"apt install python3-venv" >&2; exit 1; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA),cli,dev]'
	@touch $@

$(VENV)/.ready-frameworks: $(READY)
	@echo "Adding $(FRAMEWORKS) to $(VENV), once: torch alone may be gigabytes where there is a GPU"
	$(RUN) -m pip install --quiet --disable-pip-version-check $(FRAMEWORKS)
	@touch $@

# The reference has the pages of cupyattn.interop, which imports the frameworks.
$(VENV)/.ready-docs: $(VENV)/.ready-frameworks
	@echo "Adding cupyattn[docs] to $(VENV), once"
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(VENV)/.ready-browser: $(READY)
	@echo "Adding a browser (PySide6) to $(VENV), once"
	$(RUN) -m pip install --quiet --disable-pip-version-check PySide6
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cupyattn
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
