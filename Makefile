# make setup   .venv with everything pinned        make demo   a model learns from long text, start to end
# make check   format, lint, types, contracts      make test   the whole test suite
# make torture kills, faults, fuzzing, for hours   make audit  known holes in what is depended on
# make docs    the documentation's site, in build/docs   make test-lowest  the core on the lowest versions
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= true

DEMO_TOKENS ?= 2048
DEMO_STEPS ?= 6
DEMO_FOLDER ?= build/demo

.PHONY: setup demo test test-lowest torture check audit docs test-card format clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Narrowboat needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --editable '.[all]'
	touch $@

demo: setup
	$(BIN)/python examples/demo_data.py --tokens $(DEMO_TOKENS) $(DEMO_FOLDER)/data
	rm -rf $(DEMO_FOLDER)/run
	$(BIN)/narrowboat train examples/demo.yaml \
		--data.train $(DEMO_FOLDER)/data/train --data.heldout $(DEMO_FOLDER)/data/heldout.jsonl \
		--data.max_tokens $(DEMO_TOKENS) --train.steps $(DEMO_STEPS) --train.folder $(DEMO_FOLDER)/run
	$(BIN)/narrowboat eval $(DEMO_FOLDER)/run --data $(DEMO_FOLDER)/data/asked.jsonl --answers 6 --show 1
	$(BIN)/narrowboat report $(DEMO_FOLDER)/run

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# The suite's core on the lowest versions that pyproject.toml allows, in an environment of its own.
CORE ?= tests/machine tests/memory tests/model tests/owner tests/optimizers tests/engine tests/test_running.py

test-lowest: .venv-lowest/ready
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest $(CORE)

.venv-lowest/ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --upgrade 'pip>=25.1'
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt torch
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt --group dev --editable '.[all]'
	touch $@

torture: setup
	$(BIN)/python -m tests.torture --kills 200 --faults --limits --sizes --soak 1000
	FUZZ=10000 DAMAGE=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/fuzz

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Asks the package index for each version that is installed; --strict: one that it doesn't know is a failure.
audit: setup
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet --constraint constraints.txt pip-audit
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' > build/audit/installed.txt
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement build/audit/installed.txt

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The CUDA code on a double of each kind of card (tests/card/double): an environment of its own, 5.5 GB, no card needed.
CARDS ?= 7.5 8.6 8.9 9.0

test-card: .venv-card/ready
	.venv-card/bin/python tests/card/double/build.py build/card > build/card.env
	for card in $(CARDS); do \
		env $$(cat build/card.env) CARD_MAJOR=$${card%.*} CARD_MINOR=$${card#*.} PYTHONPATH=src \
			.venv-card/bin/python -m pytest -n 0 -p no:cacheprovider tests/card || exit 1; \
	done

.venv-card/ready: pyproject.toml
	$(PYTHON) -m venv .venv-card
	mkdir -p build && grep -v '^torch==' constraints.txt > build/card-constraints.txt
	.venv-card/bin/pip install --quiet torch
	.venv-card/bin/pip install --quiet --constraint build/card-constraints.txt --group dev --editable '.[quant,optim]'
	touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
