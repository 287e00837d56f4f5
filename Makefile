# `make demo` trains the main job on this machine's CPU; `make test` runs everything that needs no GPU;
# `make gpu-suite` runs what needs one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint requirements/constraints.txt
WHEEL := $(BIN)/pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps
# CMake, Ninja and the interpreter that finds PyTorch all come from the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
SOURCES := $(shell git ls-files -co --exclude-standard CMakeLists.txt cmake include src torch python pyproject.toml VERSION 2>/dev/null)
# The tests compile with the CUDA compiler of requirements/cuda.txt: register budgets hold for one version.
NVCC := $(CURDIR)/$(VENV)/cuda/toolkit/bin/nvcc
# Configured and built: libraries, C++ tests and the C++ package for sm_80 and sm_90a. One tree serves every target.
CONFIGURE := -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_CUDA_COMPILER=$(NVCC)
BUILD_CUDA = cmake --preset cuda $(CONFIGURE) && cmake --build --preset cuda

.PHONY: demo test cpp-test cpp-debug-test budget package-test python-test lint wheel wheel-check gpu-bundle gpu-suite bench-cpu bench-cuda clean

demo: $(VENV)/.package
	mkdir -p demo
	$(BIN)/snack train --data digits --figure demo/digits.png --json demo/digits.json --save demo/digits.safetensors

test: lint cpp-test cpp-debug-test budget package-test python-test

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

$(VENV)/.cuda: requirements/cuda.txt tools/install_cuda.sh $(VENV)/.demo
	tools/install_cuda.sh $(VENV)/cuda $(BIN)/pip
	touch $@

# The package is built as a wheel and installed, so that what is tested is what users get. For the demo: with CUDA where this
# machine has a compiler for it (machine code for sm_80 and sm_90, which newer cards take through PTX), else the CPU alone.
$(VENV)/.package: $(VENV)/.demo $(SOURCES)
	rm -f $(VENV)/.package-test
	@command -v nvcc >/dev/null || echo "nvcc was not found: building the library for the CPU alone (a CUDA toolkit on PATH adds the card)"
	$(PIP) --no-build-isolation --no-deps --force-reinstall --config-settings="cmake.define.SNACK_CUDA_ARCHITECTURES=80-real;90" .
	touch $@

# For the tests: the wheel is packed from the tree that the C++ tests were built in, so that nothing is compiled twice.
$(VENV)/.package-test: $(VENV)/.test $(VENV)/.cuda $(SOURCES) CMakePresets.json
	rm -f $(VENV)/.package
	$(BUILD_CUDA)
	rm -rf build/wheel
	$(WHEEL) --wheel-dir build/wheel --config-settings=build-dir=build/cuda .
	$(PIP) --no-deps --force-reinstall build/wheel/*.whl
	touch $@

lint: $(VENV)/.test
	$(BIN)/ruff check python tests/python tools examples
	$(BIN)/python tools/check_layers.py

cpp-test: $(VENV)/.test $(VENV)/.cuda
	$(BUILD_CUDA)
	ctest --preset cuda

cpp-debug-test: $(VENV)/.test
	cmake --preset cpu-debug
	cmake --build --preset cpu-debug
	ctest --preset cpu-debug

# Registers, stack and shared memory of every kernel against tests/budget.
budget: cpp-test
	$(BIN)/python tools/kernel_budget.py

package-test: $(VENV)/.package-test
	$(BIN)/python tools/check_wheel.py build/wheel/*.whl

# Two files at a time; what measures calls runs alone.
python-test: $(VENV)/.bench $(VENV)/.package-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/python/test_call_overhead.py
	$(BIN)/python -m pytest tests/python/test_call_overhead.py

# The wheel for users: code for every card, tagged for every Linux that it runs on.
wheel: $(VENV)/.test $(VENV)/.cuda
	rm -rf dist build/wheel-release
	cmake --preset release $(CONFIGURE)
	$(WHEEL) --wheel-dir build/wheel-release --config-settings=build-dir=build/release .
	$(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel-release/*.whl
	$(BIN)/python tools/check_wheel.py dist/*.whl

# The wheel in an environment of its own, with nothing but what it asks for and the test tools: all Python tests pass there.
wheel-check: wheel
	rm -rf build/clean
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip --disable-pip-version-check install --quiet --constraint requirements/constraints.txt -r requirements/test.txt dist/*.whl
	PATH="$(CURDIR)/build/clean/bin:$$PATH" build/clean/bin/python -m pytest

# What a machine with a GPU and no network needs, in build/gpu: libraries, C++ tests and the C++ example for the H200.
gpu-bundle: $(VENV)/.test $(VENV)/.cuda
	$(BUILD_CUDA)
	$(BIN)/python tools/gpu_bundle.py build/cuda -DCMAKE_CUDA_COMPILER=$(NVCC) "-DCMAKE_CUDA_ARCHITECTURES=80-real;90a-real"

# Fails without a GPU. Uses the virtual environment where there is one, else the interpreter that has PyTorch.
gpu-suite:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_suite.py $(GPU_SUITE)

# The peers of the processor's benchmark that are no part of PyTorch (tests read their models); without their own idea of which PyTorch.
$(VENV)/.bench: requirements/bench.txt $(VENV)/.test
	$(PIP) --no-deps -r requirements/bench.txt
	touch $@

bench-cpu: $(VENV)/.bench $(VENV)/.package
	$(BIN)/snack bench cpu

bench-cuda: $(VENV)/.test $(VENV)/.package
	$(BIN)/snack bench cuda

clean:
	rm -rf build dist demo
