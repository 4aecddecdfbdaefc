# Each target first makes .venv and the demo model if they are not there (.ci/setup); that takes minutes once.
.PHONY: demo test test-all lab bench lint setup

demo: setup ## one prompt, plain and steered, and what its activations look like
	@.venv/bin/chatspace-lab demo

test: setup ## tests and notebooks
	@.ci/test

test-all: setup ## the same, and the tests marked slow
	@.ci/test --all

lab: setup ## JupyterLab on my_notebooks/, copies of notebooks/ that git ignores, with the panels open
	@mkdir -p my_notebooks
	@for file in notebooks/*.ipynb; do [ -e "my_$$file" ] || cp "$$file" "my_$$file"; done
	@.venv/bin/jupyter lab --allow-root --LabApp.default_url=/lab/tree/10_panels.ipynb my_notebooks

bench: setup ## throughput beside plain vLLM
	@.venv/bin/chatspace-lab bench

lint: setup ## format, lint and types
	@.ci/lint

setup:
	@PYTHON="$(PYTHON)" .ci/setup
