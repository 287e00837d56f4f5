# `make demo` trains the main job on this machine's CPU; `make test` runs everything that needs no GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint requirements/constraints.txt
# CMake, Ninja and the interpreter that finds PyTorch all come from the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
SOURCES := $(shell git ls-files CMakeLists.txt cmake include src torch python pyproject.toml VERSION 2>/dev/null)

.PHONY: demo test cpp-test cpp-debug-test python-test lint wheel bench-cpu clean

demo: $(VENV)/.package
	mkdir -p demo
	$(BIN)/snack train --data digits --figure demo/digits.png --json demo/digits.json --save demo/digits.safetensors

test: lint cpp-test cpp-debug-test python-test

$(VENV)/.demo: requirements/demo.txt requirements/constraints.txt
	tools/check_prerequisites.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned dependencies into $(VENV) (PyTorch is large; this takes minutes the first time)"
	$(PIP) -r requirements/demo.txt
	touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.demo
	tools/check_prerequisites.sh test
	$(PIP) -r requirements/test.txt
	touch $@

# The package is built as a wheel and installed, so that what is tested is what users get.
$(VENV)/.package: $(VENV)/.demo $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --force-reinstall .
	touch $@

lint: $(VENV)/.test
	$(BIN)/ruff check python tests/python tools examples
	$(BIN)/python tools/check_layers.py

cpp-test: $(VENV)/.test
	cmake --preset cpu -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	cmake --build --preset cpu
	ctest --preset cpu

cpp-debug-test: $(VENV)/.test
	cmake --preset cpu-debug
	cmake --build --preset cpu-debug
	ctest --preset cpu-debug

python-test: $(VENV)/.test $(VENV)/.package
	$(BIN)/python -m pytest

wheel: $(VENV)/.test
	$(BIN)/pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

bench-cpu: $(VENV)/.test $(VENV)/.package
	$(BIN)/snack bench cpu

clean:
	rm -rf build dist demo
