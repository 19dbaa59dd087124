# Every target makes its own environment: it is installed anew when what it is made from has changed.

PYTHON ?= python3
VENV   := .venv
RANKS  ?= 2
JOBS   ?= 2
ROOM   ?=
ARGS   ?=
BENCH  ?= host_overhead step_time jax_fsdp wire hsdp pipeline bubbles formats outer balance optimizer muon memory vocabulary steps functional checkpoint plan_time auto published gpu
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
STAMP  := $(VENV)/.installed
PAGES  := $(VENV)/.pages
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

export OMP_NUM_THREADS ?= 1
# The tests start many processes: without compiled files each of them would compile the package.
unexport PYTHONDONTWRITEBYTECODE

# Runs tests beside the checks of style and types, whose output comes last; fails if either does.
define beside_lint
log=$$(mktemp); $(MAKE) --no-print-directory lint >$$log 2>&1 & lint=$$!; \
  $(1); status=$$?; wait $$lint || status=1; cat $$log; rm -f $$log; exit $$status
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help map route freeze suites mutations train bench gpu test quick parity fuzz faults hostile prose docs notebooks site lint format release clean

help:  ## Show what can be made.
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)
	@echo '  RANKS=4 and ARGS="..." are passed on by make train, ARGS by make test, quick, fuzz, docs, gpu and bench.'
	@echo '  WITH=python3 runs make gpu with a Python that has PyTorch already, where nothing can be installed.'

train: $(BASE)  ## Train a small GPT for 400 steps, sharded over RANKS processes of this machine.
	@echo 'Training on $(RANKS) ranks:'
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py --steps 400 $(ARGS)

bench: $(STAMP)  ## Run every benchmark in its quick form, against the peers; as root also over limited links.
	@status=0; for name in $(BENCH); do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py --quick $(ARGS) || status=1; done; exit $$status

gpu: $(if $(WITH),,$(STAMP))  ## Find out on one GPU, in 25 minutes, what only hardware shows; a dry run without one.
	$(or $(WITH),$(BIN)/python) -m tests.gpu $(ARGS)

test: $(STAMP)  ## Check style and types, and run the tests: some fifteen minutes on two cores.
	@$(call beside_lint,$(PYTEST) $(ARGS))

quick: $(STAMP)  ## Check style and types, and run the short tests that start no process: six minutes; ROOM=schedule for one room.
	@$(call beside_lint,$(PYTEST) -m "not slow and not processes and not long" \
	  $(if $(ROOM),tests/$(ROOM) $(wildcard fshard/$(ROOM))) $(ARGS))

parity: $(STAMP)  ## Run every model under every schedule, on 1 to 4 ranks: half an hour.
	$(PYTEST) -m slow $(ARGS)

fuzz: $(STAMP)  ## Run generated models, meshes and options against one plain process; ARGS="--cases 1000 --seed 0".
	$(BIN)/python -m tests.fuzz $(ARGS)

faults: $(STAMP)  ## Kill ranks and spoil files at every phase, and write the tables of tests/faults/README.md.
	$(BIN)/python -m tests.faults.matrix --write tests/faults/README.md $(ARGS)

hostile: $(STAMP)  ## Load ten thousand hostile files, each within bounds of memory and time.
	$(BIN)/python -m tests.security.hostile --cases 10000 $(ARGS)

suites: $(STAMP)  ## Run PyTorch's lists of modules and operators as units of sharded models; ARGS="--every 10".
	$(BIN)/python -m tests.suites $(ARGS)

mutations: $(STAMP)  ## Put twenty seeded faults into copies of the tree: tests must catch each.
	$(BIN)/python -m tests.project.mutations $(ARGS)

route: $(STAMP)  ## Count the files, classes and calls that a steady step goes through; ARGS="--list" names them.
	$(BIN)/python -m tests.project.route $(ARGS)

freeze: $(STAMP)  ## Note what seventy steps come to, bit for bit: ARGS="--write FILE", and later ARGS="--against FILE".
	$(BIN)/python -m tests.project.freeze $(ARGS)

map: $(STAMP)  ## Count what the shape of the package is made of; ARGS="--against OTHER_CHECKOUT" beside another.
	$(BIN)/python -m tests.project.map $(ARGS)

prose: $(BASE)  ## Count the words and the long sentences of README and docs; ARGS="--sentences" lists these.
	$(BIN)/python -m tests.project.prose $(ARGS)

docs: $(PAGES)  ## Build the site, build/site/index.html; ARGS="-D nb_execution_mode=force" runs its notebooks.
	$(BIN)/python -m sphinx -W --keep-going -q -j $(JOBS) -c docs -d build/pages . build/site $(ARGS)

notebooks: $(STAMP)  ## Run the notebooks and keep what they show: git diff tells what was stale.
	$(BIN)/python -m tests.notebooks

site: docs  ## Open every page of the site in a browser, and follow every link.
	$(BIN)/python docs/check_site.py build/site

lint: $(STAMP)  ## Check style, format and types.
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --strict fshard

format: $(STAMP)  ## Sort imports and format every file.
	$(BIN)/ruff check --quiet --fix --select I .
	$(BIN)/ruff format .

release: $(STAMP)  ## Build the wheel and the sdist in build/dist, check and try them, and run all tests. It tags and uploads nothing.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/python -m twine check --strict build/dist/*
	$(BIN)/check-wheel-contents build/dist/*.whl
	$(PYTEST) -m "slow or not slow" tests/project/test_packaging.py
	$(MAKE) test

clean:  ## Remove the environment, caches and build products.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# What training takes, alone: the rest of the environment takes minutes.
$(BASE): pyproject.toml constraints.txt
	@echo 'Making the environment $(VENV) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing PyTorch and fshard ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(STAMP): $(BASE)
	@echo 'Installing what tests and examples need: some minutes ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,test]'
	@touch $@

$(PAGES): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
