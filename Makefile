# Two commands on a fresh machine: `make demo` and `make test`. Both first make .venv, unless it is already right.
#
#   PYTHON=...  the Python to make .venv with (3.11, 3.12 or 3.13; found by itself otherwise)
#   ARGS=...    more for the command: make test ARGS="-k resume", make demo ARGS="--help"

# Each candidate is run, not only looked for: a version manager may answer to a name that it has no Python for.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)
ARGS ?=

# The tests run in two processes of one thread each. More threads would only fight over the cores, and their number
# changes the bits of a sum.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# As settings and not as -c, so that the environment in which setuptools builds the package is held to the same pins;
# new releases of pip read the second name there. The path is relative because pip splits the setting at spaces.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

.PHONY: help setup demo test lint peers

help:
	@echo "make demo   from nothing to samples, on built-in pictures (a few minutes; Ctrl-C, then again, goes on)"
	@echo "make test   the tests"
	@echo "make lint   ruff, and mypy on the engine"
	@echo "make setup  only .venv"
	@echo "make peers  .venv-peers: the research packages that bench/ compares with"

setup: .venv/.stamp

# openwakeword is taken for the weights that lie in it; what it wants besides, some hundred MB, is never imported.
# The stamp is written last, so a set-up that was interrupted is taken up again.
.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Tessera needs Python 3.11, 3.12 or 3.13, and none was found on the PATH." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version): a minute or two, once (.venv/install.log tells how far it is)."
	@$(PYTHON) -m venv .venv
	@$(PINNED) .venv/bin/python -m pip install --disable-pip-version-check --no-input \
		-e '.[dev,perceptual,text,video,audio,speech,voice,mesh,tensorboard]' >.venv/install.log 2>&1 \
		&& $(PINNED) .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps \
		openwakeword==0.5.1 >>.venv/install.log 2>&1 \
		|| { tail -n 20 .venv/install.log >&2; echo "The set-up failed; .venv/install.log has all of it." >&2; exit 1; }
	@touch $@

demo: .venv/.stamp
	@.venv/bin/tessera demo $(ARGS)

test: .venv/.stamp
	@$(ONE_THREAD) .venv/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/.stamp
	@.venv/bin/ruff check .
	@.venv/bin/mypy

# Not part of setup: only the comparisons in bench/ need these packages (bench/README.md).
peers:
	@PYTHON="$(PYTHON)" bash bench/peers/setup.sh
