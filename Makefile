# `make demo` and `make test` work on a fresh clone; both create .venv first if it is missing or out of date.
#
#   PYTHON=...  the Python for .venv (3.11, 3.12 or 3.13; found on the PATH otherwise)
#   ARGS=...    more arguments: make test ARGS="-k resume", make demo ARGS="--help"

# Each candidate is executed, because a version manager may provide a name without a Python behind it.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)
ARGS ?=

# The tests run in two processes of one thread each. The number of threads changes the bits of a sum.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Environment variables instead of -c, so that setuptools' build environment uses the same pins; new releases of pip
# read the second name. The path is relative because pip splits the value at spaces.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

.PHONY: help setup demo test lint peers

help:
	@echo "make demo   train and sample on synthetic images (a few minutes; Ctrl-C stops it, the same command resumes)"
	@echo "make test   run the tests"
	@echo "make lint   run ruff check, ruff format --check and mypy"
	@echo "make setup  create .venv"
	@echo "make peers  create .venv-peers with the research packages that bench/ compares with"

setup: .venv/.stamp

# openwakeword is installed for its weights; its dependencies, some hundred MB, are never imported. The stamp is
# written last, so that an interrupted set-up is repeated.
.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Tessera needs Python 3.11, 3.12 or 3.13, and none was found on the PATH." \
		"Install one, or give its path: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version): a minute or two, once (.venv/install.log shows the progress)."
	@$(PYTHON) -m venv .venv
	@$(PINNED) .venv/bin/python -m pip install --disable-pip-version-check --no-input \
		-e '.[dev,perceptual,text,video,audio,speech,voice,mesh,datasets,remote,hub,onnx,view,tensorboard]' >.venv/install.log 2>&1 \
		&& $(PINNED) .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps \
		openwakeword==0.5.1 >>.venv/install.log 2>&1 \
		|| { tail -n 20 .venv/install.log >&2; echo "The set-up failed; see .venv/install.log." >&2; exit 1; }
	@touch $@

demo: .venv/.stamp
	@.venv/bin/tessera demo $(ARGS)

test: .venv/.stamp
	@$(ONE_THREAD) .venv/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/.stamp
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

# Not part of setup: only the comparisons in bench/ need these packages (bench/README.md).
peers:
	@PYTHON="$(PYTHON)" bash bench/peers/setup.sh
