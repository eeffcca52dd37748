# make demo   sets everything up, then trains a small MoE transformer with mok and in plain PyTorch
# make test   sets everything up, then runs the tests
#
# They use .venv (VENV=... for another folder) and whatever torch >= 2.11 the machine's python3 has;
# otherwise they install the one in constraints.txt. PYTHON=... chooses the interpreter.

VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: demo test emulate bench lint format wheel sdist environment build clean

demo: build
	@$(PY) examples/demo/train.py $(ARGS)

# ARGS="-k plan" and the like go to pytest.
test: build
	@$(PY) -m pytest -q $(ARGS)

# The GPU kernels on the CPU, under adversarial schedules (part of `make test` as well).
emulate: build
	@$(PY) -m pytest -q tests/emu $(ARGS)

# ARGS="--write" records the results; BENCH=cpu_layer runs one.
BENCH = $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py))
bench: build
	@for name in $(BENCH); do $(PY) -m benchmarks.$$name $(ARGS) || exit 1; done

lint: environment
	@VENV=$(VENV) tools/lint.sh check

format: environment
	@VENV=$(VENV) tools/lint.sh fix

wheel: environment
	@rm -rf build/lib.* build/bdist.* dist/*.whl
	@$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls -1 dist/*.whl

sdist: environment
	@$(PY) -W ignore setup.py --quiet sdist --dist-dir dist
	@ls -1 dist/*.tar.gz

environment:
	@tools/setup_env.sh $(VENV)

# An editable install; afterwards only what changed is compiled.
build: environment
	@tools/build_inplace.sh $(PY)

clean:
	rm -rf build dist mok.egg-info mok/*.so mok/_build_info.py
