# make train | test | test-slow | peers | lint | format | bench | constraints
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The frameworks that weights come from and go to; without them those tests skip.
PEERS = torch==2.13.0 transformers==5.23.0

.PHONY: train test test-slow peers lint format bench constraints clean

train: $(VENV)/installed
	$(BIN)/python -m attnlab.train --config=configs/quickstart.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(VENV)/installed-test
	XLA_FLAGS="--xla_backend_optimization_level=3 $$XLA_FLAGS" $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

peers: $(VENV)/installed-peers

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/python -m attnlab.bench attention

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/installed-peers: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PEERS)
	touch $@

# The versions that the tests run with, for every Python and platform; needs uv.
constraints:
	uv pip compile --universal --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
		--extra test pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
