# Two commands from a clean checkout: `make train` and `make test`. They need python3, git and a C++ compiler.
# `make test` has every feature of every implementation; `make test-all` every kernel and combination beyond.
#
#   make train EXTRAS=cuda13 TRAIN_FLAGS="--layers=24 --heads=16 --width=1024"    on a GPU
#   make test PYTHON=python3.12 VENV=.venv312                                     another Python

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
TRAIN_FLAGS ?=
TEST_FLAGS ?= -n 2

BIN := $(VENV)/bin
comma := ,
with_extras = $(1)$(if $(EXTRAS),$(comma)$(EXTRAS))
# One stamp for each set of extras installed; what is compiled or declared makes them stale.
BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard cuda/launcher/*)
EXAMPLES_STAMP := $(VENV)/.installed-$(call with_extras,examples)
TEST_STAMP := $(VENV)/.installed-$(call with_extras,test)

.PHONY: train test test-rest test-all test-gpu lint clean

train: $(EXAMPLES_STAMP)
	$(BIN)/python examples/train_gpt.py $(TRAIN_FLAGS)

test: $(TEST_STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q --ignore=tests/gpu -m "not exhaustive" $(TEST_FLAGS)

# What `make test-all` has beyond `make test`.
test-rest: $(TEST_STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q --ignore=tests/gpu -m exhaustive $(TEST_FLAGS)

test-all: test test-rest

# On one GPU the second part has no test, which is status 5.
test-gpu: $(TEST_STAMP)
	$(BIN)/python -m pytest -q tests/gpu -n 8 --one-gpu-each --ignore=tests/gpu/test_several_gpus.py
	$(BIN)/python -m pytest -q tests/gpu/test_several_gpus.py -n 8 || [ $$? -eq 5 ]

lint: $(TEST_STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python # else it takes the python on PATH, which lacks jax

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable: a change in Python or in a kernel's source is there without installing again.
$(VENV)/.installed-%: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build runs
