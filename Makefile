# Each target first makes .venv and the demo model if they are not there (.ci/setup); that takes minutes once.
.PHONY: help demo test test-fast test-all lab bench format lint setup

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-10s %s\n", $$1, $$2}'

demo: setup ## run one prompt, plain and steered, and show its activations
	@.venv/bin/chatspace-lab demo

lab: setup ## open JupyterLab on my_notebooks/, copies of notebooks/ that git ignores
	@mkdir -p my_notebooks
	@for file in notebooks/*.ipynb; do [ -e "my_$$file" ] || cp "$$file" "my_$$file"; done
	@.venv/bin/jupyter lab --allow-root --LabApp.default_url=/lab/tree/01_first_session.ipynb my_notebooks

bench: setup ## measure throughput beside plain vLLM
	@.venv/bin/chatspace-lab bench

test: setup ## run the tests and notebooks that continuous integration runs
	@.ci/test

test-fast: setup ## run the tests that need no engine, browser or GPU: about a minute
	@.ci/test --fast

test-all: setup ## run all tests and notebooks, the slow ones too
	@.ci/test --all

format: setup ## format the code and apply safe fixes of the linter
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

lint: setup ## check format, lint and types
	@.ci/lint

setup: ## make .venv and the demo model
	@PYTHON="$(PYTHON)" .ci/setup
