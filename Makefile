# The project's verbs: `make help`. Needs bash, and a Python of at least 3.11 with venv.
#
#   PYTHON=python3.12      another interpreter for .venv
#   TORCH_INDEX_URL=...    where torch comes from, as https://download.pytorch.org/whl/cpu; else pip's usual index

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench clean

PYTHON ?=
TORCH_INDEX_URL ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BENCHES := $(patsubst bench/%.py,%,$(shell grep -l '^if __name__' bench/*.py))
YAML := $(wildcard configs/*.yaml configs/*/*.yaml deploy/*.yaml deploy/*/*.yml)
CONFIGS := $(wildcard configs/*.yaml) deploy/foreload.yaml

help: ## List the targets.
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | while IFS=$$'\t' read -r name what; do \
		printf 'make %-7s %s\n' "$$name" "$$what"; done

venv: $(STAMP) ## Install everything, pinned by constraints.txt, into .venv; nothing to do when it is up to date.

$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		found=; \
		for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
			if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "foreload needs Python 3.11 or newer with venv and ensurepip; tried: $(or $(PYTHON),python3 python3.11 python3.12 python3.13)." >&2; \
			echo "Install one (Debian: apt-get install python3-venv) or name one: make venv PYTHON=/path/to/python" >&2; \
			exit 2; \
		fi; \
		echo "venv: $(VENV) by $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV); \
	fi
	@rm -f $(STAMP)
	@echo "venv: pip 25.1 or newer (for dependency groups)"
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@echo "venv: $(TORCH)$(if $(TORCH_INDEX_URL), from $(TORCH_INDEX_URL)) (this one is large)"
	@# An index of its own may lack the pinned versions of what torch needs, so those come with the next step.
	@$(PIP) install --quiet $(if $(TORCH_INDEX_URL),--no-deps --index-url '$(TORCH_INDEX_URL)',-c constraints.txt) '$(TORCH)'
	@echo "venv: foreload[hf,onnx,openvino,remote] and the groups test and lint"
	@# The build backend warns of editable installs as such, which are what is wanted here.
	@PYTHONWARNINGS='ignore:Editable installation' $(PIP) install --quiet -c constraints.txt -e '.[hf,onnx,openvino,remote]' --group test --group lint
	@$(PIP) check
	@touch $(STAMP)

demo: $(STAMP) ## Serve real models and show what residency does; FORELOAD_SERVER__PORT=9090 chooses the port.
	@exec $(BIN)/python -m runtime.demo.tour

test: $(STAMP) ## Run every test, with coverage; fetches real weights once.
	@exec $(BIN)/python -m pytest --cov --cov-report=term

lint: $(STAMP) ## Check style, types, import directions, YAML, compose file and Dockerfile; runs all and tells all.
	@failed=(); \
	check() { local name=$$1 out; shift; \
		if out=$$("$$@" 2>&1); then printf 'lint: %-16s ok\n' "$$name"; \
		else printf 'lint: %-16s FAILED: %s\n%s\n' "$$name" "$$*" "$$out"; failed+=("$$name"); fi; }; \
	check ruff $(BIN)/ruff check .; \
	check format $(BIN)/ruff format --check .; \
	check mypy $(BIN)/mypy; \
	check pyright $(BIN)/pyright; \
	check imports $(BIN)/lint-imports; \
	check yaml $(BIN)/yamllint --strict $(YAML); \
	check compose $(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml; \
	schema=$$(mktemp); trap 'rm -f "$$schema"' EXIT; $(BIN)/foreload schema > "$$schema"; \
	check configs $(BIN)/check-jsonschema --schemafile "$$schema" $(CONFIGS); \
	check dockerfile $(BIN)/hadolint deploy/Dockerfile; \
	check shell bash -n .ci/run; \
	if [ "$${#failed[@]}" -gt 0 ]; then echo "lint: $${#failed[@]} failed: $${failed[*]}" >&2; exit 1; fi

bench: $(STAMP) ## Run every bench in its quick form; tables here, JSON in bench/out/.
	@mkdir -p bench/out; failed=(); \
	for name in $(BENCHES); do \
		$(BIN)/python -m "bench.$$name" --quick --json "bench/out/$$name.json" || failed+=("$$name"); \
	done; \
	if [ "$${#failed[@]}" -gt 0 ]; then echo "bench: failed: $${failed[*]}" >&2; exit 1; fi

clean: ## Remove what tools left behind; keeps .venv and the demo's models in var/.
	@rm -rf build dist ./*.egg-info bench/out htmlcov .coverage .coverage.* \
		.pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
