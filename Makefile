# make venv, make serve, make test: each does all of its set-up on a machine with CPython 3.12
# or newer and make. Settings: PYTHON=..., and for serve MODEL=... ARGS="--port 8001 ...".

# The first interpreter that is new enough; 3.12 is what the pinned versions were chosen with.
PYTHON ?= $(shell for python in python3.12 python3.13 python3.14 python3 python; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
    && { echo $$python; break; }; done)
MODEL ?= smollm2-135m
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv serve test lint format clean

venv: $(STAMP)

$(STAMP): requirements/ci.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "OSCAR-JAX needs CPython 3.12 or newer and found none;" \
	    "install one and name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(f"OSCAR-JAX needs CPython 3.12 or newer, and PYTHON=$(PYTHON) is {v[0]}.{v[1]}" if v < (3, 12) else 0)'
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	    || "$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; echo "python -m venv failed;" \
	    "on Debian and Ubuntu install the package python3-venv first" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/ci.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(STAMP)

serve: venv
	$(BIN)/python -m oscar_jax.serve --model $(MODEL) $(ARGS)

test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)  # most time is compiling

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-newest-jax build dist *.egg-info
