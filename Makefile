# Everything runs in .venv, which is made when it is missing or when a requirements file changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MYPY_PATH := .mypy_cache/path

.PHONY: demo test test-slow test-gpu lint format install clean

# Both ends of a real pair: checkpoints -> bundle -> parity -> engines -> text.
demo: $(STAMP)
	$(BIN)/dflash demo --output demo-output

# Two processes; a file's tests stay together, for they share what is dear to make.
WORKERS ?= 2
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu"

test-slow: lint
	$(BIN)/python -m pytest -m "not gpu"

# Needs a CUDA device. PART=kernel runs benchmarks/gpu_kernel.py alone, PART=engines benchmarks/gpu_engines.py.
# RECORD=docs/runs/NAME.json keeps what docs/verified.md is made from, of one part.
test-gpu: $(STAMP)
	$(if $(and $(RECORD),$(if $(PART),,no part)),$(error RECORD: say PART=kernel or PART=engines, too))
	$(foreach part,$(or $(PART),kernel engines),\
		$(BIN)/python benchmarks/gpu_$(part).py $(if $(RECORD),--record $(RECORD)) &&) true

# The repository is the package: mypy finds it under its name through a link.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(MYPY_PATH) && ln -sfn $(CURDIR) $(MYPY_PATH)/dflash_deploy
	$(BIN)/mypy -p dflash_deploy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# Order matters: z-lab's dflash has a console script `dflash` too, and the last one installed owns it.
$(STAMP): requirements/dev.txt requirements/originals.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/originals.txt
	rm -rf build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall -e .
	touch $@

clean:
	rm -rf build dist *.egg-info demo-output .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
