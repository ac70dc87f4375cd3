# `make demo` and `make test` are the two commands to start with. This file only names the steps;
# CMakeLists.txt and CMakePresets.json specify the build.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# ninja shows its progress on a terminal only; elsewhere it prints nothing unless a command fails.
ifndef MAKE_TERMOUT
ninja_flags := --quiet
endif
TESTS ?= .

# The demo trains on the CPU and is built without device code, which takes most of the build time.
# A demo that `make build` or `make test` has already built is used instead.
demo_preset := $(if $(wildcard build/release/examples/gpt/gpt),release,host)

.PHONY: help demo test wheel test-wheel test-jax large test-gpu build lint format asan tsan clean

help: ## List the targets
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: build/$(demo_preset)/build.ninja ## Build, then train a small GPT, write text with it and check it
	@cmake --build build/$(demo_preset) --target demo -- $(ninja_flags)

build: build/release/build.ninja ## Build the library, the tool, the examples and the tests
	@cmake --build build/release -- $(ninja_flags)

test: build/python.ok build ## Build, then run every test (TESTS=regex: only those that match)
	@ctest --preset release --progress -R '$(TESTS)'

test-gpu: build/release/build.ninja ## Build, then run every test that needs a GPU (fails where there is none)
	@cmake --build build/release --target all gpu_test_programs -- $(ninja_flags)
	@python3 tools/test_gpu.py build/release

large: build/release/build.ninja ## Tests of tensors beyond 2^31 elements (14 GiB) and long fuzzing
	@cmake --build build/release --target all cpu_large_tensors -- $(ninja_flags)
	@ctest --preset release -C long -L long --progress

asan tsan: %: build/%/build.ninja ## The tests under sanitizers: address + undefined, or thread
	@cmake --build build/$* -- $(ninja_flags)
	@ctest --preset $* --progress -R '$(TESTS)'

wheel: build/tools.ok ## Build the Python wheels into dist
	@tools/wheel

test-wheel: wheel ## Install the wheels in clean environments (PYTHONS="..." with torch 2.10 or later)
	@tools/test_wheel dist $(or $(PYTHONS),$(shell tools/python_env --path))

test-jax: build ## The tests of JAX with other versions of jax, then random cases (VERSIONS="0.7.2 ...")
	@tools/test_jax build/release $(or $(VERSIONS),0.7.2 0.10.2)
	@ctest --preset release -C long -L jax --progress

lint: build/release/build.ninja ## Every check of the sources whose tool is installed
	@tools/lint

format: ## Format the C++ and the Python sources
	@git ls-files '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format -i
	@ruff format --quiet

clean: ## Remove everything that was built
	@rm -rf build dist

# Installs the missing tools, once.
build/tools.ok: tools/bootstrap
	@tools/bootstrap
	@mkdir -p build && touch $@

# The environment of the Python tests. Without a network it cannot be made; then these tests do not
# run, and `make test` reports that each time.
build/python.ok: tools/python_env tests/python/requirements.txt tests/python/headers.txt build/tools.ok
	@if tools/python_env >/dev/null; then touch $@; rm -f build/release/build.ninja; \
	else echo "NOT RUN: the Python tests, because their environment cannot be made"; fi

build/%/build.ninja: CMakePresets.json build/tools.ok
	@mkdir -p $(@D)
	@cmake --preset $* >$(@D)/configure.log 2>&1 || { cat $(@D)/configure.log >&2; exit 1; }
	@touch $@
