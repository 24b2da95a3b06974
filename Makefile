# sglang-vattn: `make demo` and `make test` need only python3.11 or 3.12 (with venv and
# headers), a C++20 compiler and make. Everything else is installed into .venv.

# The first interpreter that runs, can make environments and has its headers.
USABLE := import ensurepip, os, sysconfig; \
	os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
.DEFAULT_GOAL := help
# A sub-process that needs ninja, cmake or clang-format finds the pinned ones first.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles what is imported and keeps that; pip would compile everything (--no-compile), half of an installation.
export PYTHONDONTWRITEBYTECODE :=

# Stamps are named after what they stand for, so nothing is repeated that is up to date,
# whatever the files' times say: the requirements and the shim; the sources of the extension
# and the *names* of the Python files (an editable install sees changes inside them).
ENV_FILES := $(wildcard requirements/*.txt tests/support/cpu_shim/*)
ENV_KEY := $(shell cat $(ENV_FILES) | sha1sum | cut -c1-12)
BUILD_KEY := $(shell { cat pyproject.toml CMakeLists.txt; \
	find csrc -type f | LC_ALL=C sort | xargs cat; \
	find sglang_vattn radix -name '*.py' | LC_ALL=C sort; } 2>/dev/null | sha1sum | cut -c1-12)
ENV_STAMP := $(VENV)/.env-$(ENV_KEY)
BUILD_STAMP := $(VENV)/.build-$(ENV_KEY)-$(BUILD_KEY)

# ThreadSanitizer cannot be combined with the other two.
SANITIZERS := address thread
CSRC = $(shell find csrc -name '*.cpp' -o -name '*.h')
PY := sglang_vattn radix tests benchmarks

.PHONY: help env build demo test test-gpu test-browser browser bench bench-gpu lint format sanitize clean fuzz soak

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

env: $(ENV_STAMP) ## make the virtual environment, with SGLang and the tools
build: $(BUILD_STAMP) ## and install this project into it (editable)

$(ENV_STAMP): $(ENV_FILES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --no-compile -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/pip install -qq --no-compile --no-deps -r requirements/cpu-nodeps.txt
	cp tests/support/cpu_shim/* "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	rm -f $(VENV)/.env-*
	touch $@

$(BUILD_STAMP): $(ENV_STAMP)
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	rm -f $(VENV)/.build-*
	touch $@

demo: build ## serve a tiny model with and without the flag, side by side
	$(BIN)/python -m benchmarks.demo

# A process a core and one more: tests wait for servers and servers for tests. The files in order, the longest first.
WORKERS := $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 5)))
TEST_FLAGS ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: export OMP_NUM_THREADS := 1
test: build ## run every test, the sanitizers' among them; the last line is pytest's
	$(BIN)/python -m pytest $(TEST_FLAGS)

# On a machine with a GPU, SGLang and this project installed; GPU_PYTHON says with which Python.
test-gpu: ## the tests that need a GPU, with the Python at hand
	$(GPU_PYTHON) -m pytest -p no:cacheprovider --noconftest -o pythonpath= -o addopts= tests/gpu

browser: build ## fetch a headless Chromium into build/, by pip and npm
	$(BIN)/python tests/support/get_chromium.py

test-browser: browser ## the live page in it
	$(BIN)/python -m pytest -o addopts=--import-mode=importlib tests/observe/test_page.py

# Small forms; the figures of docs/benchmarks.md come from the same commands without the limits.
TRACE ?= ../shared/traces/conversation_trace.jsonl
BENCH := build/bench
bench: export OMP_NUM_THREADS := 1
bench: export PYTHONWARNINGS := ignore
bench: build ## small forms of all benchmarks, without a GPU; under four minutes
	if [ -f $(TRACE) ]; then $(BIN)/python -m benchmarks.trace_replay --simulate --trace $(TRACE) --limit 400 \
		--pools 100000 --arms vattn stock_page1 stock_page64 --out $(BENCH)/trace_replay.json; \
	else echo "no trace at $(TRACE): set TRACE"; fi
	$(BIN)/python -m benchmarks.tree --rounds 10 --lengths 8192 65536 --out $(BENCH)/tree.json
	$(BIN)/python -m benchmarks.kernels --small --out $(BENCH)/kernels.json
	$(BIN)/python -m benchmarks.vmm --small --out $(BENCH)/vmm.json
	$(BIN)/python -m benchmarks.prefix_hit --small --arms vattn stock_page1 --out $(BENCH)/prefix_hit.json

# Each part is one command that is stopped after nine minutes. One that has not measured all by then fails; it keeps what
# it has and goes on when it is made again. All begin anew once build/bench-gpu is deleted. `python -m benchmarks.compare`
# compares what lies there with the committed results.
GPU_PYTHON ?= python
GPU_BENCH := build/bench-gpu
GPU_ARMS := vattn stock_page1 stock_page128 stock_no_hits
GPU_PARTS := kernels vmm serve steady first-token scrub observe $(foreach part,prefix requests trace,$(GPU_ARMS:%=$(part)-%))
GPU_PART = timeout 540 $(GPU_PYTHON) -m benchmarks
.PHONY: bench-gpu-quick $(GPU_PARTS:%=bench-gpu-%)
bench-gpu: $(GPU_PARTS:%=bench-gpu-%) ## everything, on the GPU at hand, in parts (bench-gpu-kernels, ..)
bench-gpu-quick: ## the GPU part in about nine minutes: every arm's server side by side on one GPU, fewer loads
	-timeout 110 $(GPU_PYTHON) -m benchmarks.kernels --device cuda --resume --rounds 10 --out $(GPU_BENCH)/quick/kernels.json
	-timeout 110 $(GPU_PYTHON) -m benchmarks.vmm --device cuda --resume --rounds 5 --out $(GPU_BENCH)/quick/vmm.json
	timeout -s INT -k 30 390 $(GPU_PYTHON) -m benchmarks.quick --device cuda --trace $(TRACE) --trace-seconds 10 \
		--seconds 140 --out $(GPU_BENCH)/quick
bench-gpu-kernels bench-gpu-vmm: bench-gpu-%:
	$(GPU_PART).$* --device cuda --resume --out $(GPU_BENCH)/$*.json
bench-gpu-serve:
	$(GPU_PART).serve_ab --out $(GPU_BENCH)/serve_ab.json
bench-gpu-steady:
	$(GPU_PART).steady --out $(GPU_BENCH)/steady.json
bench-gpu-first-token:
	$(GPU_PART).first_token --out $(GPU_BENCH)/first_token.json
bench-gpu-scrub:
	$(GPU_PART).scrub_cost --out $(GPU_BENCH)/scrub_cost.json
bench-gpu-observe:
	$(GPU_PART).observe_cost --device cuda --out $(GPU_BENCH)/observe_cost.json
# Without hits a load is mostly prefill and takes many times as long: one round, so these rows have no spread.
PREFIX_HIT = $(GPU_PART).prefix_hit --device cuda --resume --seconds 400 --out $(GPU_BENCH)/prefix_hit.json \
	--arms $* --rounds $(if $(filter stock_no_hits,$*),1,3)
$(GPU_ARMS:%=bench-gpu-prefix-%): bench-gpu-prefix-%:
	$(PREFIX_HIT) --sweeps prefix members prefixes
$(GPU_ARMS:%=bench-gpu-requests-%): bench-gpu-requests-%:
	$(PREFIX_HIT) --sweeps own output arrival zipf
$(GPU_ARMS:%=bench-gpu-trace-%): bench-gpu-trace-%:
	$(GPU_PART).trace_replay --serve $* --device cuda --trace $(TRACE) --seconds 120 --out $(GPU_BENCH)/trace_live.json

fuzz: build ## two million random scheduler steps against the model; prints what was tried
	VATTN_FUZZ_STEPS=$${VATTN_FUZZ_STEPS:-2000000} $(BIN)/python -m pytest tests/reliability/test_state_machine.py \
		-s --timeout=0

soak: build ## the long forms: 500 connections, 10,000 requests, 20 runs of 90 jobs, SGLang's kits in full
	VATTN_SOAK=1 $(BIN)/python -m pytest tests/reliability -s --timeout=7200 --deselect \
		tests/reliability/test_state_machine.py::test_any_order

# The C++ core under ASan with UBSan, and under TSan: its own tests, then the state machine over a module built so. Only
# the core is instrumented, so only the core is judged (no suppressions are needed); the first finding ends it.
sanitize: $(SANITIZERS:%=sanitize-%) ## run the core's tests and the state machine under the sanitizers

sanitize-%: export ASAN_OPTIONS := detect_leaks=0
sanitize-%: export UBSAN_OPTIONS := print_stacktrace=1
sanitize-%: export TSAN_OPTIONS := halt_on_error=1 ignore_noninstrumented_modules=1
sanitize-%: export VATTN_FUZZ_STEPS := 2000
sanitize-%: $(ENV_STAMP)
	mkdir -p build
	cmake -S . -B build/sanitize-$* -G Ninja -DVATTN_SANITIZE=$* -DVATTN_MODULE=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > build/sanitize-$*.log
	cmake --build build/sanitize-$*
	ASAN_OPTIONS= ctest --test-dir build/sanitize-$* --output-on-failure
	VATTN_TEST_CORE=$$(ls $(CURDIR)/build/sanitize-$*/_core*.so) LD_PRELOAD=$$($(CXX) -print-file-name=lib$(LIB_$*).so) \
		$(BIN)/python -m pytest -p no:cacheprovider -p tests.sanitizers.other_core tests/reliability/test_state_machine.py
LIB_address := asan
LIB_thread := tsan

# radix/ is installed as sglang_vattn.radix; mypy sees it there through links.
lint: build ## ruff, mypy and clang-format, nothing is changed
	ruff check $(PY)
	ruff format --check $(PY)
	rm -rf build/lint && mkdir -p build/lint/sglang_vattn
	ln -s $(CURDIR)/sglang_vattn/* build/lint/sglang_vattn/
	ln -s $(CURDIR)/radix build/lint/sglang_vattn/radix
	cd build/lint && mypy --config-file $(CURDIR)/pyproject.toml -p sglang_vattn
	MYPYPATH=build/lint mypy -p tests.support -p tests.serving -p tests.observe -p benchmarks -p tests.benchmarks -p tests.parallel -p tests.two_gpus
	clang-format --dry-run -Werror $(CSRC)

format: $(ENV_STAMP) ## let ruff and clang-format rewrite the files
	ruff check --fix $(PY)
	ruff format $(PY)
	clang-format -i $(CSRC)

clean: ## remove everything that make made
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
