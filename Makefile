# `make train`: the main job on the built-in corpus. `make test`: everything that CI runs. `make check`: its quick part.
PYTHON ?= python3
PLATFORM ?= gpu
VENV := .venv
LOWEST := .venv-lowest
NEWEST := .venv-newest
TARGETS := .venv-targets
NEWEST_PYTHON ?= python3.12
# pip compiles no modules: most are never imported.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
UV := $(VENV)/bin/python -m uv --quiet
# uv reads no settings of pip.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# A test of each dependency; the test of a run uses most of them. In the suite, JAX is nearly the lowest version too.
LOWEST_TESTS := $(addprefix tests/,$(addprefix test_cli.py::test_,all_help_documents_every_setting a_packed_plan_has_a_page \
  a_mistake_is_told_and_ends_with_exit_code_2) runs/test_fit_options.py::test_a_run_leaves_everything_behind \
  planning/test_kernels.py::test_few_samples_run_without_numba_and_many_with_it \
  $(addsuffix .py,compiling/test_compile data/test_arrow_files data/test_open models/test_hugging_face \
  planning/test_cost_model runs/test_config runs/test_directory runs/test_trackers training/test_checkpoint))

# Tests that need no PyTorch.
NEWEST_TESTS := $(addprefix tests/,_common attention batches compiling data distributed estimates experimental foreign inference \
  loading models parallel planning reports runs sorting targets testing training test_cli.py test_imports.py)

# Tests that find most mistakes in a minute: planning in both packages, data, compiling, commands, docs.
CHECK_TESTS := $(addprefix tests/,_common planning data compiling $(addsuffix .py,test_cli test_imports test_style test_docs) \
  $(addprefix parity/test_,$(addsuffix .py,batching buckets order plan plan_file pacing lr streams)))

.PHONY: train test others check lint docs lowest newest suite compositions targets few-targets bench gpu clean

train: $(VENV)/installed
	@echo "training 360 steps on the built-in corpus: the first in half a minute, all in one to five minutes; Ctrl-C saves them"
	$(VENV)/bin/jvarlen train $(ARGS)

test: $(VENV)/installed-dev
	$(MAKE) --jobs 2 suite others

# These run while tests of several processes wait. Their output is printed at the end.
others: $(VENV)/installed-dev
	nice $(MAKE) --jobs 1 lint docs lowest few-targets >$(VENV)/others.log 2>&1; status=$$?; cat $(VENV)/others.log; exit $$status

# Before a commit: lint, types and the quick tests, in a minute and a half.
check: lint
	$(VENV)/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m 'not slow and not multiprocess and not gpu' $(CHECK_TESTS)

suite: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# 200 random layouts and models for ten steps each; the suite tries a few for three steps.
compositions: $(VENV)/installed-dev
	COMPOSITIONS=200 COMPOSITION_STEPS=10 $(VENV)/bin/python -m pytest --numprocesses 2 $(ARGS) tests/parallel/test_compositions.py

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

# The site, in docs/_build. Warnings are errors.
docs: $(VENV)/installed-dev
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 docs docs/_build

# The package in an environment of the lowest versions that pyproject.toml allows, without PyTorch: the package index
# has only CUDA builds of its lowest version. Warnings of old packages are ignored.
lowest: $(VENV)/installed-dev
	$(UV) venv --allow-existing --python $(VENV)/bin/python $(LOWEST)
	$(UV) pip install --python $(LOWEST)/bin/python --upgrade --reinstall-package jvarlen --resolution lowest-direct \
	  '.[data,fast,hugging-face,tensorboard]'
	$(UV) pip install --python $(LOWEST)/bin/python pytest beartype hypothesis
	$(LOWEST)/bin/python -m pytest -q -o addopts= -o filterwarnings= -m 'not multiprocess' $(LOWEST_TESTS)

# The quick tests with the newest versions, without PyTorch, on a newer Python: JAX 0.10 is the last for Python 3.11.
newest:
	rm -rf $(NEWEST)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile '.[data,fast,hugging-face,tensorboard]' \
	  beartype dm-haiku equinox grain hypothesis pytest pytest-xdist pyyaml
	$(NEWEST)/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m 'not slow and not multiprocess and not gpu' $(NEWEST_TESTS)

# Steps compiled for GPUs and TPUs, without these devices, in a separate environment. CUDNN=1 adds those with attention
# by cuDNN, 1.1 GB more.
targets: $(TARGETS)/installed
	$(if $(CUDNN),$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile nvidia-cudnn-cu12)
	JAX_PLATFORMS=cpu $(TARGETS)/bin/python -m pytest -q --numprocesses 2 $(ARGS) tests/estimates/test_estimated_memory.py \
	  $(addprefix tests/targets/test_,$(addsuffix .py,compile_for programs))

# A few of them, with compilers that are kept outside of this clone, if they can be installed.
few-targets: $(VENV)/installed-dev
	$(VENV)/bin/python -m tests.targets.compilers -q -m 'not slow' tests/targets/test_programs.py

$(TARGETS)/installed: pyproject.toml
	rm -rf $(TARGETS)
	$(PYTHON) -m venv $(TARGETS)
	$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile '.[target-gpu,target-tpu]' \
	  beartype hypothesis pytest pytest-xdist
	touch $@

# The quick form of every benchmark, and one report of all in benchmarks/results.
bench: $(VENV)/installed-dev
	$(VENV)/bin/python benchmarks/run.py --quick $(ARGS)

# On a machine with a GPU, with that machine's Python and packages, in 12 minutes, or ARGS='--seconds 570'.
# PLATFORM=cpu tries the same on a CPU.
gpu:
	PYTHONPATH=. $(PYTHON) -m tests.gpu --platform $(PLATFORM) $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing jvarlen into $(VENV): pip prints nothing for about a minute"
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

# uv saves half a minute; `make train` does without it.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --constraint constraints.txt uv
	$(UV) pip install --python $(VENV)/bin/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(TARGETS) docs/_build
