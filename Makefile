# make serve [ARGS="--ctx-size 1024 --parallel 4"]   make test [TESTS="tests/pure -k pool"]   make check   make bench
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
TESTS ?= tests

.PHONY: help serve setup build test check bench clean

help:
	@echo "make serve   serve the demo model on 127.0.0.1:8080; ARGS=\"...\" passes flags (python -m pyserve --help)"
	@echo "make setup   everything needed to work on pyserve, in .venv"
	@echo "make test    all tests; TESTS=\"...\" chooses some"
	@echo "make check   ruff, mypy --strict, import directions"
	@echo "make bench   benchmarks, results as JSON in bench/results"
	@echo "make clean   remove .venv and what was built"

serve:
	@$(PYTHON) tools/set_up.py serve
	@exec $(BIN)/python -m pyserve $(ARGS)

setup:
	@$(PYTHON) tools/set_up.py dev
	@$(BIN)/python -c "import pyserve.ops"

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy --strict pyserve
	$(BIN)/python -m pytest -q -p no:xdist tests/test_imports.py

bench: setup
	@mkdir -p bench/results
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-json=bench/results/$$(date +%Y%m%d-%H%M%S).json

clean:
	rm -rf .venv build dist *.egg-info
