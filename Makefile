# `make search` and `make test` set up .venv and run; nothing else needs to be installed but Python 3.11+, a C++ compiler and make.

PYTHON ?= python3
BIN := .venv/bin
# more than there are cores: tests wait for processes of their own a third of the time
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(2, 3 * os.cpu_count() // 2))')

# the executor and the emulator's runtime, each checked as it is compiled: its sources one behind the other in one unit
NATIVE := evoengine/sass/core evoengine/cuda_emulator/runtime
define tidy
	@mkdir -p build/$(1)
	@printf '#include "%s"\n' $(sort $(wildcard $(1)/*.cpp)) >build/$(1)/unit.cpp
	$(BIN)/clang-tidy --quiet build/$(1)/unit.cpp -- -std=c++20 -w -I. $(2)
endef

.PHONY: search test test-all lint docs gpu clean

search: .venv/ready
	$(BIN)/evoengine search --gpu h100

# hundreds of processes import the package; without bytecode each would compile it again
test test-all: export PYTHONDONTWRITEBYTECODE =

test: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m ""

lint: .venv/linters
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/clang-format --dry-run --Werror $(wildcard $(NATIVE:%=%/*.cpp) $(NATIVE:%=%/*.h))
	$(call tidy,evoengine/sass/core)
	$(call tidy,evoengine/cuda_emulator/runtime,-fno-exceptions -fno-rtti -Ievoengine/cuda_emulator/include)

# the documentation as a site: build/site/index.html
docs: .venv/writers
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet

gpu: .venv/ready
	$(BIN)/python benchmarks/gpu.py --no-tests

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"evoengine needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cuda13,test]'
	touch $@

.venv/linters: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lint]'
	touch $@

.venv/writers: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist
