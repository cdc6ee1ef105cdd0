# `make train`: the main job on the built-in corpus. `make test`: everything that CI runs. `make check`: its quick part.
PYTHON ?= python3
PLATFORM ?= gpu
VENV := .venv
LOWEST := .venv-lowest
NEWEST := .venv-newest
TARGETS := .venv-targets
NEWEST_PYTHON ?= python3.12
# Modules are compiled when they are first imported, and most never are.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
UV := $(VENV)/bin/python -m uv --quiet
# uv reads no settings of pip.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# A test of each package that is used; one of a run uses most of them. JAX is nearly the lowest in the suite as well.
LOWEST_TESTS := $(addprefix tests/,$(addprefix test_cli.py::test_,help_documents_every_setting a_packed_plan_has_a_page \
  a_mistake_is_told_and_ends_with_exit_code_2) runs/test_fit.py::test_a_run_leaves_everything_behind \
  planning/test_kernels.py::test_few_samples_run_without_numba_and_many_with_it \
  $(addsuffix .py,compiling/test_compile data/test_arrow_files data/test_open models/test_hugging_face \
  planning/test_cost_model runs/test_config runs/test_directory runs/test_trackers training/test_checkpoint))

# What does without PyTorch.
NEWEST_TESTS := $(addprefix tests/,_common attention batches compiling data distributed estimates experimental foreign inference \
  loading models parallel planning reports runs sorting targets testing training test_cli.py test_imports.py)

# What finds most mistakes in a minute: planning in both packages, data, compiling, the commands, the docs.
CHECK_TESTS := $(addprefix tests/,_common planning data compiling $(addsuffix .py,test_cli test_imports test_style test_docs) \
  $(addprefix parity/test_,$(addsuffix .py,batching buckets order plan plan_file pacing lr streams)))

.PHONY: train test others check lint docs lowest newest suite compositions targets few-targets bench gpu clean

train: $(VENV)/installed
	$(VENV)/bin/jvarlen train --max-shapes auto $(ARGS)

test: $(VENV)/installed-dev
	$(MAKE) --jobs 2 suite others

# Tests of several processes often wait; meanwhile these run. What they say comes in one piece.
others: $(VENV)/installed-dev
	nice $(MAKE) --jobs 1 lint docs lowest few-targets >$(VENV)/others.log 2>&1; status=$$?; cat $(VENV)/others.log; exit $$status

# Before a commit: lint, types and the quick tests, in a minute and a half.
check: lint
	$(VENV)/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m 'not slow and not multiprocess and not gpu' $(CHECK_TESTS)

suite: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# 200 random layouts and models for ten steps each, of which the suite tries a few for three.
compositions: $(VENV)/installed-dev
	COMPOSITIONS=200 COMPOSITION_STEPS=10 $(VENV)/bin/python -m pytest --numprocesses 2 $(ARGS) tests/parallel/test_compositions.py

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

# The site, in docs/_build; a warning is an error.
docs: $(VENV)/installed-dev
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 docs docs/_build

# The package in an environment of the lowest versions that pyproject.toml allows, but for PyTorch, of which the package
# index has only builds for CUDA that low; warnings of old packages are their own.
lowest: $(VENV)/installed-dev
	$(UV) venv --allow-existing --python $(VENV)/bin/python $(LOWEST)
	$(UV) pip install --python $(LOWEST)/bin/python --upgrade --reinstall-package jvarlen --resolution lowest-direct \
	  '.[data,fast,hugging-face,tensorboard]'
	$(UV) pip install --python $(LOWEST)/bin/python pytest beartype hypothesis
	$(LOWEST)/bin/python -m pytest -q -o addopts= -o filterwarnings= -m 'not multiprocess' $(LOWEST_TESTS)

# The quick tests with the newest versions, on a newer Python: JAX stops at 0.10 on Python 3.11. Without PyTorch, of which
# the package index may have only builds for CUDA.
newest:
	rm -rf $(NEWEST)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile '.[data,fast,hugging-face,tensorboard]' \
	  beartype dm-haiku equinox grain hypothesis pytest pytest-xdist pyyaml
	$(NEWEST)/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m 'not slow and not multiprocess and not gpu' $(NEWEST_TESTS)

# Steps compiled for GPUs and TPUs, whose compilers run without them, in an environment of their own; with CUDNN=1
# also those whose attention is by cuDNN, 1.1 GB more.
targets: $(TARGETS)/installed
	$(if $(CUDNN),$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile nvidia-cudnn-cu12)
	JAX_PLATFORMS=cpu $(TARGETS)/bin/python -m pytest -q --numprocesses 2 $(ARGS) tests/estimates/test_estimated_memory.py \
	  $(addprefix tests/targets/test_,$(addsuffix .py,compile_for programs))

# A few of them, by compilers that are kept outside of this clone, where they can be had.
few-targets: $(VENV)/installed-dev
	$(VENV)/bin/python -m tests.targets.compilers -q -m 'not slow' tests/targets/test_programs.py

$(TARGETS)/installed: pyproject.toml
	rm -rf $(TARGETS)
	$(PYTHON) -m venv $(TARGETS)
	$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile '.[target-gpu,target-tpu]' \
	  beartype hypothesis pytest pytest-xdist
	touch $@

# Every benchmark in its quick form, and one report of all in benchmarks/results.
bench: $(VENV)/installed-dev
	$(VENV)/bin/python benchmarks/run.py --quick $(ARGS)

# On a machine with a GPU, with that machine's own Python and packages; PLATFORM=cpu tries the same on a CPU.
gpu:
	PYTHONPATH=. $(PYTHON) -m tests.gpu --platform $(PLATFORM) $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

# By uv, which takes half a minute less; the main job does without it.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --constraint constraints.txt uv
	$(UV) pip install --python $(VENV)/bin/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(TARGETS) docs/_build
