# make test, make demo: each makes .venv when it is not there. `make help` lists the rest.
# All but gpu-test and gpu-bench is for a CPU; those two use an environment that is there already (docs/gpu.md).

TORCH ?= 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WORKERS ?= 2
ARGS ?=
GPU_PYTHON ?= python3
# Where gpu-bench writes: the day and the commit, or "tree" without git.
OUT ?= reports/h200/$(shell date +%F)-$(shell git rev-parse --short HEAD 2>/dev/null || echo tree)
# What gpu-bench measures: audio too, where there are clips. A --sets in ARGS comes after it and wins.
COMMA := ,
GPU_SETS ?= h200$(if $(findstring --librispeech,$(ARGS)),$(COMMA)h200-audio)

# The first that really starts: pyenv leaves a shim for versions that are not selected.
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
	if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	then echo $$name; break; fi; done)

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# Read by every later install, so that none of them swaps the CPU build for another.
PINS := $(VENV)/pins.txt

# Without a GPU every test of gpu-test would be skipped, and that reads like success.
define GPU_CHECK
import sys
advice = "name a Python with a CUDA build of PyTorch: GPU_PYTHON=PATH (docs/gpu.md)"
try:
    import torch
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}; {advice}")
if not torch.cuda.is_available():
    sys.exit(f"{sys.executable}: PyTorch {torch.__version__} sees no CUDA GPU; {advice}")
print(f"{sys.executable}: PyTorch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
endef
export GPU_CHECK

.PHONY: test demo lint gpu-test gpu-bench clean help $(VENV)

test: $(VENV)/.dev  ## run the tests (ARGS='-k name' narrows them, WORKERS=4 widens them)
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

demo: $(VENV)/.runtime  ## compare HEAD with a commit planted on top of it, and show the report
	$(PY) -m gate.cli demo $(ARGS)

lint: $(VENV)/.dev  ## ruff and mypy, as review asks for them
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict engine gate

gpu-test:  ## on a GPU: tests/gpu, and the kernels' own tests there (ARGS='-n 10' widens them)
	@$(GPU_PYTHON) -c "$$GPU_CHECK"
	$(GPU_PYTHON) -m pytest tests/gpu tests/kernels $(ARGS)

gpu-bench:  ## on a GPU: the benchmark, into a dated folder of reports/h200 (ARGS='--librispeech DIR' adds audio)
	@$(GPU_PYTHON) -c "$$GPU_CHECK"
	@$(if $(findstring -audio,$(GPU_SETS) $(ARGS)),:,echo "text alone; with audio: make gpu-bench ARGS='--librispeech DIR'")
	$(GPU_PYTHON) -m tests.perf.h200 --out $(OUT) --sets $(GPU_SETS) $(ARGS)

$(VENV): $(VENV)/.dev  ## make the environment with everything the tests need

# A stamp is newer than what it was made from, so a second run installs nothing.
$(VENV)/.torch-$(TORCH):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 with venv found; name one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.torch-* $(VENV)/.runtime $(VENV)/.dev
	@# PyPI's torch brings gigabytes of CUDA on most machines; PyTorch's index has the CPU build but is not reachable from all.
	$(PIP) install --retries 0 --timeout 5 --extra-index-url $(CPU_INDEX) torch==$(TORCH) \
		|| $(PIP) install torch==$(TORCH)
	echo 'torch==$(TORCH)' > $(PINS)
	touch $@

# Editable, for the commands `omni` and `gate`. Arms of a comparison import their own tree all the same: the gate
# starts them with cwd and PYTHONPATH set to it.
$(VENV)/.runtime: $(VENV)/.torch-$(TORCH) pyproject.toml
	$(PIP) install -c $(PINS) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -c $(PINS) -e '.[dev]'
	touch $@

clean:  ## remove the environment, caches and build outputs (runs/ and reports/ stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find engine gate tests workloads -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z$$][^=]*:.*## / { sub(/\$$\(VENV\)/, ".venv", $$1); printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
