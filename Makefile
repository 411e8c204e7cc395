# millrace: `make serve` and `make test` need only python3 (3.11+) with venv and pip, make and git.
PYTHON  ?= python3
VENV    ?= .venv
ARGS    ?=
# What to serve; the built-in model if empty.
MODEL    =
# Tests that run side by side; each has a core of its own.
WORKERS ?= 2
# The MLX back-end: Metal comes with MLX on a Mac; Linux gets the CPU wheel unless told otherwise.
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),metal,cpu)
comma   := ,
SERVING  = vision,localai,smg$(if $(filter cuda%,$(BACKEND)),$(comma)$(BACKEND))
BIN      = $(VENV)/bin
PIP      = $(BIN)/python -m pip --disable-pip-version-check
# What serving needs, and what development needs besides: `make serve` brings no test tools.
SERVES   = $(VENV)/.serves-$(BACKEND)
DEVELOPS = $(VENV)/.develops-$(BACKEND)
# Client libraries ask for versions of each other's parts that millrace's own environment need not follow.
CLIENTS ?= .venv-clients
GATEWAY ?= .venv-gateway
PAGE    ?= .venv-page

.PHONY: help setup serve chat prove test lint unit test-heavy test-models test-agents test-clients test-gateway demo-gateway test-page test-package test-ranks test-fuzz test-minilm bench-core hashes wheel docs base-image image clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(SERVES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "millrace needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing millrace and its $(BACKEND) back-end into $(VENV) ..."
	@$(PIP) install -q -c constraints.txt -e ".[$(SERVING)]"
	@$(PIP) install -q -c constraints.txt --no-deps mlx-vlm
	@$(if $(filter metal,$(BACKEND)),,$(BIN)/python packaging/backend.py $(BACKEND))
	@$(if $(filter cpu,$(BACKEND)),$(BIN)/python -m millrace.native.ahead)
	@rm -f $(VENV)/.serves-* && touch $@

$(DEVELOPS): $(SERVES)
	@echo "Installing what tests and lint need into $(VENV) ..."
	@$(PIP) install -q -c constraints.txt -e ".[dev,$(SERVING)]"
	@rm -f $(VENV)/.develops-* && touch $@

setup: $(DEVELOPS)  ## Make .venv and install everything, development's tools included

serve: $(SERVES)  ## Serve the built-in model, or MODEL=auto, MODEL=qwen3-4b; ARGS="--port 9000" and BACKEND=cuda13 pass through
	@$(BIN)/millrace serve$(if $(MODEL), $(MODEL)) $(ARGS)

chat: $(SERVES)  ## Talk to the server's model in the terminal; ARGS="--url http://127.0.0.1:9000" passes through
	@$(BIN)/millrace chat $(ARGS)

# Near-ties of low precision (3) are a finding and no failure of the command.
prove: $(SERVES)  ## Write millrace-proof.md, the report to attach to an issue, in about five minutes
	@$(BIN)/millrace prove $(ARGS) || test $$? -eq 3

test: lint unit  ## Lint and all tests

lint: setup  ## ruff, mypy (strict) and the import contracts
	@$(BIN)/ruff check millrace tests benchmarks packaging
	@$(BIN)/ruff format --check millrace tests benchmarks packaging
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

unit: setup  ## The tests; ARGS="-k name" passes through
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-heavy: setup  ## Longer runs of the random ones (200 schemas, 50 tool calls, 100,000 steps), and the proof beside mlx-lm
	@MILLRACE_HEAVY=1 $(BIN)/python -m pytest tests/api/test_structured.py tests/api/test_tools.py tests/prove tests/engine/test_many_steps.py --timeout 3000 $(ARGS)

test-models: setup  ## Every kind of model that the installed mlx-lm has a file for, in a tiny shape
	@MILLRACE_MODELS=1 $(BIN)/python -m pytest tests/kinds --timeout 600 $(ARGS)

test-agents: setup  ## Real coding agents, from the npm registry, as clients
	@MILLRACE_AGENTS=1 $(BIN)/python -m pytest tests/agents -rs --timeout 900 $(ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/constraints.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "Installing client libraries into $(CLIENTS) ..."
	@$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@touch $@

test-clients: setup $(CLIENTS)/.installed  ## litellm, LangChain, pydantic-ai, instructor and openai-agents as clients
	@MILLRACE_CLIENTS=1 MILLRACE_PYTHON=$(abspath $(BIN))/python $(CLIENTS)/bin/python -m pytest tests/clients --timeout 300 $(ARGS)

$(GATEWAY)/.installed: tests/smg_gateway/requirements.txt tests/smg_gateway/constraints.txt
	@test -x $(GATEWAY)/bin/python || $(PYTHON) -m venv $(GATEWAY)
	@echo "Installing the gateway into $(GATEWAY) ..."
	@$(GATEWAY)/bin/python -m pip install -q --disable-pip-version-check -c tests/smg_gateway/constraints.txt -r tests/smg_gateway/requirements.txt
	@touch $@

test-gateway: setup $(GATEWAY)/.installed  ## PyPI's SMG gateway in front of our workers
	@MILLRACE_GATEWAY=1 MILLRACE_PYTHON=$(abspath $(BIN))/python $(GATEWAY)/bin/python -m pytest tests/smg_gateway --timeout 300 $(ARGS)

$(PAGE)/.installed: tests/page/requirements.txt tests/page/constraints.txt
	@test -x $(PAGE)/bin/python || $(PYTHON) -m venv $(PAGE)
	@echo "Installing what drives a browser into $(PAGE) ..."
	@$(PAGE)/bin/python -m pip install -q --disable-pip-version-check -c tests/page/constraints.txt -r tests/page/requirements.txt
	@touch $@

test-page: setup $(PAGE)/.installed  ## The page at / in a chromium, where there is one (MILLRACE_BROWSER names another)
	@MILLRACE_PAGE=1 MILLRACE_PYTHON=$(abspath $(BIN))/python $(PAGE)/bin/python -m pytest tests/page -rs --timeout 300 $(ARGS)

test-package: setup  ## The wheel and the checkout installed by pip, pipx, uv and Docker's steps, each into nothing
	@MILLRACE_PACKAGE=1 $(BIN)/python -m pytest tests/package -s --timeout 1800 $(ARGS)

demo-gateway: setup $(GATEWAY)/.installed  ## Two workers behind it, of which one is killed and replaced under load
	@$(BIN)/python benchmarks/gateway.py --smg $(GATEWAY)/bin/smg --demo $(ARGS)

test-ranks: setup  ## Models split over ranks: shapes, drift, losses, cut links (as root), LocalAI
	@MILLRACE_SPLIT_TESTS=1 $(BIN)/python -m pytest tests/ranks -s --timeout 900 $(ARGS)

test-fuzz: setup  ## 5,000 (MILLRACE_FUZZ) random and as many hostile requests to every endpoint
	@MILLRACE_FUZZ=$${MILLRACE_FUZZ:-5000} $(BIN)/python -m pytest tests/api/test_openapi.py tests/api/test_fuzz.py -k "random or hostile" -s --timeout 6000 $(ARGS)

test-minilm: setup  ## The real MiniLM against plain numpy; MILLRACE_MINILM=FOLDER names it
	@MILLRACE_MINILM=$(MILLRACE_MINILM) $(BIN)/python -m pytest tests/models/test_minilm.py $(ARGS)

bench-core: setup  ## Our server against raw mlx-lm and mlx_lm.server, one table
	@$(BIN)/python benchmarks/core.py $(ARGS)

hashes: setup  ## Write packaging/hashes, what releases are installed from, after constraints.txt has changed
	@$(BIN)/python packaging/hashes.py

wheel:  ## dist/: the wheel as it is released, built by tools that are pinned with hashes
	@rm -rf build/wheel-env && $(PYTHON) -m venv build/wheel-env
	@build/wheel-env/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r packaging/hashes/build.txt
	@build/wheel-env/bin/python -m pip wheel -q --disable-pip-version-check --no-index --no-deps --no-build-isolation -w dist .

docs:  ## build/site: the docs as a site, with every link checked
	@test -x build/docs-env/bin/mkdocs || { $(PYTHON) -m venv build/docs-env && \
	  build/docs-env/bin/python -m pip install -q --disable-pip-version-check -r packaging/docs.txt; }
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --strict -q && echo "build/site/index.html"

base-image:  ## Record which image the Dockerfile's base tag is now; needs Docker
	@$(PYTHON) packaging/image.py resolve

image:  ## Build the release image from the recorded base; BACKEND=cuda13 and ARGS pass through
	@$(PYTHON) packaging/image.py build $(if $(filter metal,$(BACKEND)),cpu,$(BACKEND)) $(ARGS)

clean:  ## Remove what make made
	rm -rf $(VENV) $(CLIENTS) $(GATEWAY) $(PAGE) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
