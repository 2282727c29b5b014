# Everything a user or CI needs; `make help` lists it. All of it runs in .venv, made on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where Python is told to keep no bytecode, every process of the tests would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo check format quick test docs sanitize sweep bench gpu clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

NATIVE := src/plait/comm/shm/native

$(BIN)/.installed: pyproject.toml constraints.txt $(wildcard $(NATIVE)/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

install: $(BIN)/.installed  ## .venv with the locked dependencies and the package

demo: install  ## train a small Llama on Python's own sources, on two ranks (about 5 minutes)
	$(BIN)/plait train recipes/demo.toml

check: install  ## format, lint, types, imports, sizes, words, links: under a minute
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/structure.py
	$(BIN)/python tools/build_site.py --links

format: install  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quick: install  ## one test for each claim, without the checks: under two minutes
	$(BIN)/python tools/run_tests.py -m quick

# Installed where it is, torchao slows every import of transformers: only the test of its bits sees it. Where
# pip cannot get it, that test is skipped.
TORCHAO := build/torchao

$(TORCHAO): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ torchao && touch $@ || rm -rf $@

# The same for compressed-tensors, which loads what `plait export --weights` writes.
COMPRESSED := build/compressed-tensors

$(COMPRESSED): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ compressed-tensors loguru && touch $@ || rm -rf $@

# The same for Weights & Biases.
WANDB := build/wandb

$(WANDB): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --upgrade --target $@ wandb && touch $@ || rm -rf $@

# The same for trl, whose files of chat templates are read, and for datasets, without what plait has.
TRL := build/trl
DATASETS := build/datasets

$(TRL): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ trl && touch $@ || rm -rf $@

$(DATASETS): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ datasets dill multiprocess pandas pyarrow xxhash && \
		touch $@ || rm -rf $@

# The same for lm-evaluation-harness, without what only some of its tasks need.
LM_EVAL := build/lm-eval

$(LM_EVAL): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ lm_eval sacrebleu colorama lxml portalocker tabulate \
		requests certifi charset-normalizer urllib3 && touch $@ || rm -rf $@

# And for the generator of the site.
GENERATOR := build/site-generator

$(GENERATOR): constraints.txt $(BIN)/.installed
	$(BIN)/pip install --quiet --upgrade --target $@ zensical && touch $@ || rm -rf $@

docs: install $(GENERATOR)  ## the documentation site, in build/site
	PYTHONPATH=$(GENERATOR) $(BIN)/python tools/build_site.py

test: check $(TORCHAO) $(COMPRESSED) $(WANDB) $(TRL) $(DATASETS) $(LM_EVAL) $(GENERATOR)  ## everything that CI runs
	$(BIN)/python tools/run_tests.py --libraries

# The C sources in a program of their own, with the compiler's checks of memory and of threads.
SANITIZED := build/native-address build/native-thread
build/native-address: SANITIZERS := address,undefined
build/native-thread: SANITIZERS := thread

$(SANITIZED): $(wildcard $(NATIVE)/*.[ch] tests/native/*.[ch])
	@mkdir -p $(@D)
	$(CC) -std=c11 -g -O3 -UNDEBUG -ffp-contract=off -fno-trapping-math -Wall -Wextra -Werror \
		-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all -I$(NATIVE) $(filter %.c,$^) -o $@ -lpthread

sanitize: $(SANITIZED)  ## the C sources under the compiler's address, undefined and thread sanitizers
	build/native-address
	build/native-thread

# The peers that benchmarks/requirements.txt names are installed with the package here, and nowhere else.
BENCH_VENV ?= build/bench-venv

$(BENCH_VENV)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet -c constraints.txt -e . -r benchmarks/requirements.txt
	@touch $@

bench: $(BENCH_VENV)/.installed  ## the benchmarks and the peers that they need, one table and one JSON each
	$(BENCH_VENV)/bin/python benchmarks/run_all.py

# Such a machine may have no network: nothing is installed, and the Python that has torch is used.
gpu:  ## checks and measurements on this machine's GPUs, an hour; GPU="--stage NAME": one stage
	$(or $(wildcard $(BIN)/python),python3) benchmarks/gpu/run.py $(GPU)

sweep: install  ## every combination of options that `test` covers in pairs (half an hour)
	$(BIN)/python -m pytest tests -m sweep

clean:  ## what the targets above made, but for .venv
	rm -rf runs data build .mypy_cache .ruff_cache .pytest_cache .hypothesis
