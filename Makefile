# make verify     every backend on this machine against the float64 oracle, real embeddings included
# make test       lint, types and tests with coverage
# make test-slow  the tests that take longer: kernels compiled, ranks that die, mutants, other libraries
# make test-gpu   the tests that need a CUDA GPU, with whatever Python has torch for it: PYTHON=...
# make -k -j 16 verify-gpu   all that holds the GPU backends to the oracle: verify, mutants, sanitizers, drawn problems
# make docs       the site, into site/
# make docs-version VERSION=0.1  the site as one version beside the others, committed to the branch gh-pages
# make package    sdist and wheel in dist/, checked; each in an empty environment runs the README, verify and the pages' commands
# make test-versions  the tests of the front door with the newest packages, or with VERSIONS="numpy==1.26.* torch==2.6.*"
# Each but test-gpu and verify-gpu needs Python 3.11+ with pip, and nothing else: a virtual environment in $(VENV) holds the rest.
#
#   VENV=DIR          where the virtual environment goes
#   PYTHON=python3.12 the interpreter it is made from
#   PIP_FLAGS=...     more for pip install, e.g. an index of CPU wheels (Linux wheels of torch can bring CUDA along)

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
PINS := constraints.txt
STAMPS := $(VENV)/.installed
# only what is imported is compiled, and then
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(PINS) $(PIP_FLAGS)

# each worker would compile every module that it imports, seconds of torch's alone
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: verify test test-slow test-gpu verify-gpu kernels-gpu memcheck-gpu measure-gpu test-versions lint types coverage pytest docs docs-version package errors clean

verify: $(STAMPS)-verify
	$(BIN)/contrastile verify $(ARGS)

test: lint types coverage pytest

lint: $(STAMPS)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# both at once, on a core each
types: $(STAMPS)-test
	$(BIN)/pyright --pythonpath $(BIN)/python & $(BIN)/mypy; found=$$?; wait $$! && exit $$found

# the oracle and the bounds are what everything else is held to: not one line goes untested by their own tests; a tracer
# takes as long as what it traces, so that the other tests run without one
COVERING := tests/oracle tests/verify/test_bounds.py
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal
coverage: $(STAMPS)-test
	$(PYTEST) -m "not slow" $(COVERING) --cov=contrastile.oracle --cov=contrastile.verify.bounds \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100

# a process for each core
pytest: $(STAMPS)-test
	$(PYTEST) -m "not slow" $(COVERING:%=--ignore=%) $(ARGS)

test-slow: $(STAMPS)-test-slow
	$(PYTEST) -m slow $(ARGS)

# on a machine with a GPU, in an environment that has torch, triton and CuPy for it; elsewhere they are skipped
test-gpu:
	TRITON_INTERPRET=0 $(PYTHON) -m pytest tests/gpu tests/training/test_training_gpu.py tests/test_capacity.py $(ARGS)

# there, too: jobs that make runs side by side, on one GPU; each ends with an error where something is wrong. Nothing is timed.
# make verify-gpu/cupy/bfloat16, drawn-gpu/triton/float32/tf32, sanitizer-gpu/racecheck run one
KINDS := $(addprefix triton/,float32/split float32/tf32 bfloat16 float16) $(addprefix cupy/,float32/ieee float32/tf32 bfloat16 float16)
EXAMPLES ?= 12500
SEED ?= 0
ON_GPU = PYTHONPATH=. TRITON_INTERPRET=0 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
PART = $(word $(1),$(subst /, ,$(2)))
VERIFY_GPU = $(ON_GPU) $(PYTHON) -m contrastile verify --device cuda --quiet --seed $(SEED) --jobs 2 \
  --backend $(call PART,1,$*) --dtype $(call PART,2,$*) $(addprefix --precision ,$(call PART,3,$*))
SANITIZER ?= $(or $(shell command -v compute-sanitizer),/usr/local/cuda/bin/compute-sanitizer)
# libraries ask the driver for entry points that it may lack, which memcheck would report. initcheck does not see what
# the copy engine writes and cuBLAS reads: of this tool, findings in a library's kernels do not count
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(ON_GPU) $(SANITIZER) --tool $(1) --error-exitcode 1 --target-processes all \
  --show-backtrace no $(if $(filter memcheck,$(1)),--report-api-errors no) $(if $(filter initcheck,$(1)),--kernel-name kns=contrastile)
# both paths of a kernel, every kind of positives, several column blocks, the sigmoid loss
SMALL = --device cuda --dtype bfloat16 --property value gradients --case ragged large-logits labels self-excluded blocks sigmoid-ids
# a pool of memory would hide a step beyond one of its blocks: each array is an allocation of its own
UNPOOLED = $(PYTHON) -c "import sys, cupy, pytest; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))" -p no:cacheprovider
verify-gpu: $(KINDS:%=verify-gpu/%) $(KINDS:%=drawn-gpu/%) $(addprefix sanitizer-gpu/,racecheck memcheck initcheck synccheck) \
  kept-gpu/1 kept-gpu/16 memcheck-gpu mutants-gpu/triton mutants-gpu/cupy

# CuPy's kernels are compiled once, before anything else runs, so that no two jobs compile the same one
kernels-gpu:
	$(ON_GPU) $(PYTHON) scripts/cupy_resources.py --keep --capability $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .) > /dev/null

verify-gpu/%: kernels-gpu
	$(VERIFY_GPU)

drawn-gpu/%: kernels-gpu
	$(VERIFY_GPU) --case drawn --property drawn --examples $(EXAMPLES)

# what may be kept between the passes: all of small problems, and of larger ones all or a part of the rows
kept-gpu/%: kernels-gpu
	$(ON_GPU) $(PYTHON) -m contrastile verify --device cuda --quiet --backend cupy --dtype bfloat16 --keep $* \
	  --case wide hot certain wordnet@14.3 wordnet@100

sanitizer-gpu/%: kernels-gpu
	$(call SANITIZE,$*) $(UNPOOLED) -p pytest_contrastile --pyargs contrastile.verify --backend cupy $(SMALL)
	$(call SANITIZE,$*) $(UNPOOLED) tests/gpu/test_cupy_gpu.py -k give_the_same_bits

memcheck-gpu:
	$(call SANITIZE,memcheck) $(PYTHON) -m contrastile verify --quiet --backend triton $(SMALL)

# one for each: a backend that is missing would pass beside the other
mutants-gpu/%: kernels-gpu
	$(ON_GPU) $(PYTHON) -m contrastile mutate --device cuda --quiet --component $* --jobs 4

# the records of this commit, one after another, so that nothing runs beside what is timed
measure-gpu:
	mkdir -p out
	$(PYTHON) benchmarks/everyday.py --part everyday --out out/everyday.json
	$(PYTHON) benchmarks/everyday.py --part steps peers --seconds 900 --out out/gpu.json
	$(PYTHON) benchmarks/training_steps.py caches --out out/training.json

# the address of the sources that pyproject.toml has
docs docs-version: export REPO_URL ?= $(shell $(PYTHON) -c 'import tomllib; \
  print(tomllib.load(open("pyproject.toml", "rb"))["project"].get("urls", {}).get("Source", ""))')
docs docs-version: export EDIT_URI ?= $(if $(REPO_URL),edit/main/docs/)

docs: $(STAMPS)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-version: $(STAMPS)-docs
	VERSIONS=mike NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

# a wheel and an sdist are what they should be when a stranger's empty environment can use them
package:
	rm -rf dist build
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(VENV)-package/bin/python -m build --outdir dist .
	$(VENV)-package/bin/python -m twine check --strict dist/*
	for kind in no only; do \
	  rm -rf $(VENV)-stranger && $(PYTHON) -m venv $(VENV)-stranger && \
	  $(VENV)-stranger/bin/python -m pip install --quiet --disable-pip-version-check -c $(PINS) $(PIP_FLAGS) \
	    --find-links dist --$$kind-binary contrastile "contrastile[torch,verify]==$$(cd dist && ls *.whl | cut -d- -f2)" && \
	  sed -n '/^```python/,/^```/{//!p}' README.md | (cd / && $(abspath $(VENV))-stranger/bin/python -) && \
	  (cd / && $(abspath $(VENV))-stranger/bin/contrastile verify --case smoke ragged hot) || exit 1; \
	done
	cd / && $(abspath $(VENV))-stranger/bin/python -m pytest -p no:cacheprovider $(CURDIR)/tests/test_docs.py \
	  -m slow -k commands $(ARGS)

# what runs everywhere: the losses, the oracle and two backends, with whatever versions there are
test-versions: FRONT = front_door nn autograd transforms plan
test-versions:
	$(PYTHON) -m venv $(VENV)-versions
	$(VENV)-versions/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[torch,verify]' \
	  pytest mpmath ml_dtypes $(VERSIONS)
	$(VENV)-versions/bin/python -m pytest -m "not slow" tests/oracle tests/backends/test_torch.py $(FRONT:%=tests/test_%.py)
	$(VENV)-versions/bin/contrastile verify --backend numpy torch --case smoke ragged hot certain public-losses

# the errors and the commands' options in docs/reference are what the code says, not what somebody wrote down
errors: $(STAMPS)-test
	$(BIN)/python scripts/make_pages.py

$(STAMPS)-verify: EXTRAS = torch,verify
$(STAMPS)-test: EXTRAS = test
$(STAMPS)-test-slow: EXTRAS = test-slow
$(STAMPS)-docs: EXTRAS = docs

$(STAMPS)-%: pyproject.toml $(PINS) | $(BIN)/python
	$(INSTALL) -e '.[$(EXTRAS)]'
	touch $@

# some systems ship Python without ensurepip: then the system's own pip fills the environment
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "contrastile needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV) 2>/dev/null || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install --quiet pip; }

clean:
	rm -rf site build dist htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache
