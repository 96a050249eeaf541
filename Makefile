# The two commands: `make demo` and `make test`. Each makes .venv, installs what constraints.txt pins, and does its job.
# `make test` also makes .venv-flower, for the tests that run on Flower: it needs older versions of a few packages.
PYTHON ?= python3
BIN := .venv/bin
FLOWER := .venv-flower/bin
export PYTHONDONTWRITEBYTECODE = 1

PYTEST = $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder  # a file's shared runs are made once; conftest.py puts long files first

.PHONY: demo check test test-core test-flower test-gpu docs paper install clean

demo: .venv/core.done
	$(BIN)/fedlens demo

test test-core test-flower check: export OMP_NUM_THREADS = 1  # processes that tests start would fight over the cores

# all checks
test: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) --jobs 2 --output-sync=target test-core test-flower  # Flower mostly waits, so it runs beside the rest

test-core: .venv/dev.done
	$(PYTEST)

# for moment-to-moment work: no tests that start processes
check: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m 'not gpu and not processes'

# SuperLink, SuperNodes and Flower's simulation as processes on loopback
test-flower: .venv-flower/done
	$(FLOWER)/python -m pytest tests/test_flower.py

# on a machine with a GPU and torch already there: make test-gpu PYTHON=python3
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/test_gpu.py

# the documentation, into site/, from an environment of its own: mkdocs, and torch, for which a build without CUDA is enough
docs: .venv-docs/done
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# all tables and figures of the paper from results/, and paper/paper.pdf where latexmk or another TeX is installed
paper: .venv/core.done
	$(BIN)/fedlens report results --out paper --paper

install: .venv/core.done

.venv/core.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,hf,mlflow,notebooks,search,tensorboard,wandb]'
	touch $@ .venv/core.done

.venv-docs/done: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	touch $@

.venv-flower/done: pyproject.toml constraints-flower.txt
	test -x $(FLOWER)/python || $(PYTHON) -m venv .venv-flower
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt -e '.[flower]' pytest
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-flower demo runs studies report site build dist
