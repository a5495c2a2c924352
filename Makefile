# make train | quick | test | test-slow | test-versions | test-hardware | test-jla | test-fa4 | campaigns | mutants | minutes | peers | lint |
#      format | bench | docs | lessons | figures | planned | conformance | constraints; CONTRIBUTING.md says what each does, and
#      for how long
# Otherwise each subprocess of the tests would byte-compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# If uv is available, it installs in seconds what takes pip minutes.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL = $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python -c constraints.txt,$(PIP))
# The README's commands draw figures, hence [plots]. With an NVIDIA GPU, JAX is installed for it: make train CUDA=cuda12 if its driver is older than 580.
CUDA ?= $(if $(shell command -v nvidia-smi),cuda)
COMMA = ,
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
# The tests compile without optimizations unless these flags are set.
OPTIMIZED = XLA_FLAGS="--xla_backend_optimization_level=3 $$XLA_FLAGS"
# The frameworks that weights are converted from and to, TransformerLens, fla (only its plain PyTorch files are read), and
# ONNX for its test vectors. Tests that need them skip without them.
PEERS = torch==2.13.0 transformers==5.23.0 transformer-lens==4.3.0 fla-core==0.6.0 onnx==1.23.2
# The tests of everything that can differ between versions of JAX, Flax, Optax and Orbax.
VERSIONED = tests/ops tests/training --ignore=tests/training/test_pretrained.py \
	tests/nn/test_versions.py tests/test_train.py tests/test_compilation.py tests/interop/test_flax.py \
	tests/interop/test_export.py tests/interop/test_huggingface_families.py tests/interop/test_transforms.py \
	tests/see/test_capturing.py tests/see/test_edits.py tests/testing/test_check_recurrence.py

.PHONY: train quick test test-slow test-versions test-hardware test-jla test-fa4 campaigns mutants minutes peers lint format bench docs \
	lessons figures planned conformance constraints clean

train: $(VENV)/installed
	$(BIN)/python -m attnlab.train --config=configs/quickstart.py

# While working on a change: lint, the tests for what differs from main, and a few from every floor; two minutes.
quick: lint
	$(BIN)/python -m tests.quick -n 2 --dist worksteal -q -m "not slow and not campaign and not hardware"

test: $(VENV)/installed-test
	$(PYTEST) -m "not slow and not campaign and not hardware"

test-slow: $(VENV)/installed-test
	$(PYTEST) -m "slow and not campaign and not hardware"

# For another Python: make test-versions PYTHON=python3.12 VENV=.venv-newer
test-versions: $(VENV)/installed-test
	$(PYTEST) --hypothesis-profile=few -m "not slow and not campaign and not hardware" $(VERSIONED)
	$(PYTEST) tests/test_optimized.py

# Compiles for TPUs and GPUs that are not here. The compilers need Python 3.12 and more disk space than anything else:
# make test-hardware PYTHON=python3.12 VENV=.venv-hardware
test-hardware: $(VENV)/installed-hardware
	$(OPTIMIZED) $(PYTEST) -m hardware tests/hardware tests/planning tests/test_plan.py

# Hundreds of random cases, kills and damaged files; takes an hour or more, and is not part of .ci/run.
campaigns: $(VENV)/installed-test
	$(OPTIMIZED) $(PYTEST) -m campaign
	$(BIN)/python -m tests.campaigns.faults --kills=100 --stops=40 --corruptions=200 --full_disks=10

# Checks whether the fast tests notice small faults in the source; the table is build/mutants.csv.
mutants: $(VENV)/installed-test
	$(BIN)/python tests/mutants.py

# The minutes of the table in CONTRIBUTING.md, from the last run of .ci/run.
minutes:
	$(PYTHON) docs/minutes.py

peers: $(VENV)/installed-peers

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/python -m attnlab.bench attention

# The site, in build/site: index.html there opens without a server. Any warning is an error. Lessons show
# their stored outputs.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Executes the notebooks and stores their outputs.
lessons: $(VENV)/installed-docs
	$(BIN)/python docs/lessons.py

# The figures of the README and of the study pages, from real runs.
figures: $(VENV)/installed-docs
	$(BIN)/python docs/figures.py

# The tables of docs/guide/hardware.md; takes most of an hour:
# make planned PYTHON=python3.12 VENV=.venv-hardware
planned: $(VENV)/installed-hardware
	$(BIN)/python docs/planned.py

# The tables of docs/guide/conformance.md, four minutes: checks attention of other libraries against the specification.
# tokamax and TransformerLens cannot be installed together: make conformance VENV=.venv-conformance
conformance: $(VENV)/installed-test
	$(PIP) torch==2.13.0 tokamax==0.0.12
	$(BIN)/python docs/conformance.py

# The adapters to other projects' kernels, each two minutes and in its own folder, because jax-linear-attention pins JAX:
# make test-jla PYTHON=python3.12 VENV=.venv-jla
test-jla test-fa4: test-%:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,$*]"
	$(BIN)/python -m pytest $(shell find tests/ops -name test_$*.py)

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[plots$(if $(CUDA),$(COMMA)$(CUDA))]"
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e ".[test]"
	touch $@

$(VENV)/installed-hardware: $(VENV)/installed-test
	$(INSTALL) -e ".[hardware]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -e ".[docs]"
	touch $@

$(VENV)/installed-peers: $(VENV)/installed-test
	$(PIP) $(PEERS)
	touch $@

# The versions that the tests run with, for every Python and platform; needs uv.
constraints:
	uv pip compile --universal --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
		--extra test --extra docs pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) .cache build *.egg-info
