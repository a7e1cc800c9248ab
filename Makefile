# make demo, make test: they install what they need into .venv and .vulkan in this folder. They need no root.
#
#   PYTHON=python3.13       the interpreter for .venv
#   ARGS="-k timeline"      arguments for the demo, for bench or for pytest
#   CUDA_BINDINGS=12.9.1    the version of cuda-bindings for test-cuda, installed beside .venv's
#   HIP_BINDINGS=7.2.2.562.43  the version of hip-python for test-hip, test-manual and bench; .venv has none
#   ICEORYX2=0.10.0         the version of iceoryx2 for test-manual and bench; .venv has none
#   SOURCES=../rocm         the sources of AMD's runtime, for test-hip-amd; tests/simulated/amd.py lists the checkouts
#   TORCH=torch==2.13.0     the torch that test-exchange installs beside .venv, with MPI; a CPU build is enough
#   FRAMEWORKS="jax==0.10.2"  what test-frameworks and test-manual install beside torch: 400 MB, of which Warp is 150
#   RENDERERS="moderngl==5.13.0"  what test-renderers installs beside torch: 1 GB, of which VTK is 560 MB, slangpy 290
#   WITH=sockets            run test-exchange only over sockets, which needs no installation
#   JOBS=4                  how many processes share the tests of a run; 0 runs pytest directly, for -s and --pdb
#   MINUTES=10              the duration of each run of soak and of interrupts
#   SEED=1                  the seed of interrupts; by default the time, which it prints
#   RELEASE=v0.1.0          the tag that wheel-check builds; by default it rehearses a release
#   VULKAN_FLAGS=--require  fail if a software driver is missing
#   DRIVERS=lavapipe        the system drivers for test-system-vulkan, such as nvidia; none hides Vulkan from every test

PYTHON ?= python3
ARGS ?=
CUDA_BINDINGS ?=
HIP_BINDINGS ?= 10.0.0.0.1.2
ICEORYX2 ?= 0.10.0
SOURCES ?=
TORCH ?= torch==2.13.0
MPI ?= mpi4py==4.1.2 mpich==5.0.2
MODERNGL := moderngl==5.13.0 glcontext==3.1.0
FRAMEWORKS ?= jax==0.10.2 ml_dtypes==0.6.0 numba==0.68.1 pyarrow==26.0.1 warp-lang==1.19.0 $(MODERNGL) $(DRJIT:%=%==1.5.0)
RENDERERS ?= $(MODERNGL) pyglet==2.1.19 PyOpenGL==3.1.10 vtk==9.7.2 vispy==0.17.0 slangpy==0.43.1 pygfx==0.17.0 wgpu==0.32.0 \
    rendercanvas==2.7.2 glfw==2.11.0 python-xlib==0.33
WITH ?=
RELEASE ?=
JOBS ?= 4
MINUTES ?= 1
SEED ?=
VULKAN_FLAGS ?=
DRIVERS ?=
GLSLFLAGS ?= --quiet

SHELL := /bin/sh
.SHELLFLAGS := -euc
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# The tests start hundreds of interpreters. Each would compile its imports again and start NumPy's threads.
unexport PYTHONDONTWRITEBYTECODE
export OPENBLAS_NUM_THREADS = 1

SPACE := $(subst ,, )
# The tests choose their drivers and variables. This hides variables that a user's shell has set for other programs,
# except those that the tests read.
FOREIGN := $(filter-out $(addprefix GPUINTEROP_,TEST_% REQUIRE_% SIM_% STANDIN_% EXPLORE% SEEDS KIT_LIMIT), \
    $(filter VK_% GPUINTEROP_% CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES PYTEST_% \
        __EGL_% __GL_% __GLX_% EGL_% GALLIUM_% LIBGL_% LP_% MESA_% DISPLAY WAYLAND_DISPLAY,$(.VARIABLES)))
# The folders of LD_LIBRARY_PATH that contain Python's library.
PYTHONS = $(foreach folder,$(subst :, ,$(LD_LIBRARY_PATH)),$(if $(wildcard $(folder)/libpython*),$(folder)))
CLEAN = unset VK_ADD_DRIVER_FILES __EGL_VENDOR_LIBRARY_FILENAMES $(foreach name,$(FOREIGN),$(if $(findstring .,$(name)),,$(name))); \
    export LD_LIBRARY_PATH=$(subst $(SPACE),:,$(strip $(PYTHONS)))
TESTED = $(CLEAN); $(if $(filter none,$(DRIVERS)),,. .vulkan/env;) \
    export VK_DRIVER_FILES="$${VK_ADD_DRIVER_FILES:-/nonexistent}" VK_LOADER_LAYERS_DISABLE='~implicit~'; \
    export VK_ICD_FILENAMES="$$VK_DRIVER_FILES" VK_LAYER_PATH="$${VK_ADD_LAYER_PATH-}"; unset VK_ADD_DRIVER_FILES; \
    export __EGL_VENDOR_LIBRARY_FILENAMES="$${__EGL_VENDOR_LIBRARY_FILENAMES:-/nonexistent}"
ifeq ($(MAKELEVEL),0)
unexport PYTHONPATH $(filter GPUINTEROP_SIM_% GPUINTEROP_STANDIN_%,$(.VARIABLES))
endif

# make holds back the output of a target until it ends, but not this text.
PROGRESS = exec 9>&2; export GPUINTEROP_TEST_PROGRESS=9
BUSY := $(PYTHON) tools/busy.py
SYSTEM := $(shell uname -sm)
# Dr.Jit has wheels only for Linux on x86-64.
DRJIT := $(if $(findstring x86_64,$(SYSTEM)),drjit)
CC_GIVEN := $(filter environment command,$(origin CC))
VENV := .venv
BIN := $(VENV)/bin
# With PYTHON given, .venv is created again unless that interpreter created it. Without PYTHON, any .venv is used.
MADE := $(VENV)/.made$(if $(filter file,$(origin PYTHON)),,-$(subst /,_,$(PYTHON)))
# Each version has its own folder.
EXCHANGE := $(VENV)/exchange-$(subst $(SPACE),-,$(subst ==,-,$(subst /,_,$(TORCH) $(MPI))))
BESIDE := $(VENV)/frameworks-$(subst $(SPACE),-,$(subst ==,-,$(subst /,_,$(FRAMEWORKS))))
RENDERING := $(VENV)/renderers-$(subst $(SPACE),-,$(subst ==,-,$(subst /,_,$(strip $(RENDERERS)))))
# Most tests wait, so they run in parallel. (pytest-xdist's loadgroup hangs if a time-out has ended a worker.)
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
SHADERS := $(wildcard docs/examples/*.comp)

.PHONY: help demo bench docs check-docs test test-all test-main test-manual test-kit test-cuda test-exchange test-system-vulkan \
    test-frameworks test-renderers test-workflows test-hip test-hip-amd test-hip-amd-asan explore soak soak-host soak-cuda soak-hip \
    interrupts interrupts-host interrupts-cuda interrupts-hip \
    test-lowest-cuda test-lowest-hip \
    memcheck lint types check format shaders wheel-check vulkan drivers clean

help:
	@echo "make demo         run the demo on this machine's devices"
	@echo "make bench        the cost of calls and frames: on the host, then on simulated CUDA and HIP drivers, which do nothing"
	@echo "make vulkan       fetch software drivers of Vulkan and OpenGL; '. .vulkan/env' enables them, for any venv"
	@echo "make test         run test-main, test-cuda and test-hip"
	@echo "make test-all     run these and the longer tests: the others below, and the lowest bindings"
	@echo "make test-main    the core, the host backend and Vulkan"
	@echo "make test-cuda    the CUDA backend, on a simulated driver"
	@echo "make test-hip     the HIP backend, on a simulated runtime"
	@echo "make test-hip-amd SOURCES=DIRECTORY  test-hip on AMD's runtime, built from AMD's sources, with a simulated device"
	@echo "make test-hip-amd-asan SOURCES=DIRECTORY  test-hip-amd under AddressSanitizer"
	@echo "make test-kit     the conformance kit: a toy backend passes, and broken ones fail"
	@echo "make test-exchange  processes that agree: over sockets, torch.distributed and MPI"
	@echo "make test-system-vulkan DRIVERS=lavapipe  tests/graphics on the system's Vulkan driver of that name"
	@echo "make test-manual  the code blocks of README and docs, and the examples of docstrings"
	@echo "make test-workflows  the reusable workflow's steps with a sample library, whose reports become one table"
	@echo "make test-frameworks  NumPy, torch, JAX, numba, PyArrow, Warp and Dr.Jit use shared memory in place"
	@echo "make test-renderers  moderngl, pyglet, PyOpenGL, VTK, vispy, slangpy and pygfx draw shared memory; their windows"
	@echo "make explore      the core's threads in more orders than test-main tries; takes long"
	@echo "make soak MINUTES=10  random public operations in eight threads, on the host and the simulated drivers"
	@echo "make interrupts MINUTES=10  Ctrl-C, RecursionError and MemoryError at random points of one thread; nothing may leak"
	@echo "make check        lint, types and tests"
	@echo "make memcheck     the conformance suite on the GPU, under compute-sanitizer"
	@echo "make lint         ruff, import-linter's contracts, zizmor and repo-review"
	@echo "make types        mypy --strict, and mypy on the programs of the manual"
	@echo "make format       let ruff format and fix what it can"
	@echo "make docs         build the manual into docs/_build/html"
	@echo "make check-docs   build the manual and check it in Chromium: overflowing pages, and the first search results"
	@echo "make shaders      compile the shaders of the examples"
	@echo "make wheel-check  rehearse a release: build, check, install from an index and test, outside the checkout"
	@echo "make wheel-check RELEASE=v0.1.0  the same for that tag of the checkout; the files are written to dist"
	@echo "make clean        remove everything that these have created"

demo: $(VENV)/.test vulkan
	@. .vulkan/env; exec $(BIN)/gpuinterop demo $(ARGS)

# The simulated drivers do nothing, so the times are only gpuinterop's.
bench: $(VENV)/.test vulkan
	@$(TESTED); export PYTHONPATH="$(WHEELS)"; $(BIN)/python -m tools.bench --backend host $(ARGS)
	@$(TESTED); export GPUINTEROP_SIM_DOES_NOTHING=1 PYTHONPATH="$(WHEELS)"; \
	    for vendor in $(VENDORS); do \
	        $(BIN)/python -m gpuinterop.testing.simulated $$vendor -- $(BIN)/python -m tools.bench $(ARGS); \
	    done

# A process has only one driver of a vendor, and the processes of test-main have none. One group at a time would leave
# processors idle, because its tests wait; three at a time would mix their output, so each prints when it ends. Their
# requirements are not prerequisites here, so that they are fetched in parallel too.
test:
	@echo "The core, CUDA and HIP are tested in parallel. Each prints its output when it ends, and its progress until then."
	@$(PROGRESS); $(MAKE) --no-print-directory -j3 --output-sync=target test-main test-cuda test-hip \
	    $(if $(filter file,$(origin JOBS)),JOBS='$$(if $$(filter test-main,$$@),4,2)')

# torch is large and not available for every system. The group that waits most is first, because others run beside it.
test-all: test-workflows test-main test-cuda test-hip test-kit test-manual test-exchange test-frameworks \
    test-renderers test-lowest-cuda test-lowest-hip

# The backends only find the library through the bindings: each call of the table, and the suites with most types.
ONCE = ARGS="$(or $(ARGS),-k 'TestMemory or TestAllocation or TestArray or TestGraph or test_facts or test_unknown_status')"
test-lowest-cuda: $(VENV)/.test drivers
	@$(MAKE) --no-print-directory test-cuda CUDA_BINDINGS=12.9.1 $(ONCE)

test-lowest-hip: $(VENV)/.test drivers
	@GPUINTEROP_SIM_HIP_ABORT=0 $(MAKE) --no-print-directory test-hip HIP_BINDINGS=7.2.2.562.43 $(ONCE)

# Long tests. test-main and test-cuda leave them to test-kit, and test-cuda leaves the exchange to test-exchange.
KIT := $(addprefix tests/meta/test_,$(addsuffix .py,junit plugin profiles simulated toy)) \
    tests/graphics/test_vulkan_validation.py
TWO_PROCESSES := tests/vendors/cuda/test_selftest_multicast.py

test-main: $(VENV)/.test drivers
	@$(TESTED); $(PYTEST) $(addprefix --ignore ,$(KIT)) $(ARGS) || $(NONE_SELECTED)

# With the fetched loader and layers. Fails if the named driver is missing.
test-system-vulkan: $(VENV)/.test vulkan
	@$(TESTED); unset VK_DRIVER_FILES VK_ICD_FILENAMES; export GPUINTEROP_REQUIRE_VULKAN=1; \
	    GPUINTEROP_TEST_DRIVERS=$(or $(DRIVERS),lavapipe) $(PYTEST) tests/graphics $(ARGS) || $(NONE_SELECTED)

# Each page runs in its own process. What ran on a GPU is compared with its record (tools/manual.py).
test-manual: $(VENV)/.test $(BESIDE) $(EXCHANGE) drivers
	@$(TESTED); GPUINTEROP_TEST_FRAMEWORKS="$(SITES):$(WHEELS)" \
	    GPUINTEROP_TEST_EXCHANGE="$(CURDIR)/$(EXCHANGE)" \
	    $(PYTEST) tests/manual $(ARGS) || $(NONE_SELECTED)

docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

check-docs: docs
	@$(BIN)/python tools/measure_pages.py docs/_build/html

test-kit: $(VENV)/.test drivers
	@$(TESTED); $(PYTEST) $(KIT) $(ARGS) || $(NONE_SELECTED)
	@$(TESTED); GPUINTEROP_TEST_VENDOR=cuda $(PYTEST) $(TWO_PROCESSES) $(ARGS) || $(NONE_SELECTED)

# The manual's sample library runs the reusable workflow's steps, one row after the other.
test-workflows: $(VENV)/.test drivers
	@$(TESTED); $(PYTEST) -n0 tests/workflows $(ARGS) || $(NONE_SELECTED)

# With one more pre-emption. -rP shows how many schedules each scene had.
explore: $(VENV)/.test
	@$(CLEAN); GPUINTEROP_EXPLORE=1 $(PYTEST) -rP tests/core/test_explorer.py $(ARGS) || $(NONE_SELECTED)

test-cuda: $(VENV)/.test $(if $(CUDA_BINDINGS),$(VENV)/cuda-bindings-$(CUDA_BINDINGS)) drivers
	@$(TESTED); $(if $(CUDA_BINDINGS),export GPUINTEROP_TEST_CUDA_BINDINGS=$(CUDA_BINDINGS) \
	    PYTHONPATH="$(CURDIR)/$(VENV)/cuda-bindings-$(CUDA_BINDINGS)";) \
	    GPUINTEROP_TEST_VENDOR=cuda $(PYTEST) tests/vendors $(addprefix --ignore ,$(TWO_PROCESSES) tests/vendors/cuda/test_exchange.py) $(ARGS) || $(NONE_SELECTED)

# torch and MPI are only visible to processes that the tests start, because other tests behave differently with torch.
test-exchange: $(VENV)/.test $(if $(filter sockets,$(WITH)),,$(EXCHANGE))
	@$(CLEAN); $(if $(filter sockets,$(WITH)),,GPUINTEROP_TEST_EXCHANGE="$(CURDIR)/$(EXCHANGE)") \
	    $(PYTEST) -n0 tests/vendors/cuda/test_exchange.py $(ARGS) || $(NONE_SELECTED)

# Other tests do not see the frameworks, as in test-exchange. One process, because imports of frameworks take seconds.
test-frameworks: $(VENV)/.test $(BESIDE) $(EXCHANGE) drivers
	@$(TESTED); PYTHONPATH="$(SITES)" \
	    GPUINTEROP_REQUIRE_FRAMEWORKS=numpy,torch,jax,ml_dtypes,numba,pyarrow,warp,$(DRJIT) \
	    $(BIN)/python -m pytest tests/frameworks $(ARGS) || $(NONE_SELECTED)

# slangpy needs further libraries. torch's threads spin while they wait for each other, which makes tests much slower if
# llvmpipe's threads and other tests share the processors.
test-renderers: $(VENV)/.test $(RENDERING) $(EXCHANGE) drivers
	@$(BUSY) 'fetching what slangpy needs' $(PYTHON) tools/fetch_vulkan.py slangpy $(VULKAN_FLAGS)
	@$(TESTED); OMP_NUM_THREADS=1 PYTHONPATH="$(call SITES_OF,$(RENDERING) $(EXCHANGE))" $(PYTEST) tests/renderers $(ARGS) || $(NONE_SELECTED)

# Python's path to the packages that are installed beside .venv.
SITES = $(call SITES_OF,$(BESIDE) $(EXCHANGE))
SITES_OF = $$($(BIN)/python -c 'import sys, sysconfig; print(*(sysconfig.get_path( \
    "platlib", sysconfig.get_preferred_scheme("prefix"), {"platbase": one}) for one in sys.argv[1:]), sep=":")' \
    $(foreach folder,$(1),"$(CURDIR)/$(folder)"))

# With the default switch interval, and with one so short that a thread runs only a few instructions at a time.
soak: soak-host soak-cuda
soak-host soak-cuda soak-hip: $(VENV)/.test
	@$(CLEAN); for switch in default 1e-6; do \
	    PYTHONPATH="$(CURDIR)/$(VENV)/hip-python-$(HIP_BINDINGS)" $(BIN)/python -m tests.simulated.stress \
	        --backend $(@:soak-%=%) --minutes $(MINUTES) --switch $$switch; \
	done

interrupts: interrupts-host interrupts-cuda
interrupts-host interrupts-cuda interrupts-hip: $(VENV)/.test
	@$(CLEAN); PYTHONPATH="$(CURDIR)/$(VENV)/hip-python-$(HIP_BINDINGS)" $(BIN)/python -m tests.simulated.interrupts \
	    $(@:interrupts-%=%) $$($(BIN)/python -c 'print($(MINUTES) * 60)') $(SEED)

# These have wheels only for Linux on x86-64.
WHEELS := $(CURDIR)/$(VENV)/hip-python-$(HIP_BINDINGS):$(CURDIR)/$(VENV)/iceoryx2-$(ICEORYX2)
ifeq ($(SYSTEM),Linux x86_64)
soak: soak-hip
interrupts: interrupts-hip
soak-hip interrupts-hip test-manual bench: $(VENV)/hip-python-$(HIP_BINDINGS)
test-manual bench: $(VENV)/iceoryx2-$(ICEORYX2)
bench: VENDORS := cuda hip
test-hip: $(VENV)/.test $(VENV)/hip-python-$(HIP_BINDINGS) drivers
	@$(TESTED); GPUINTEROP_TEST_HIP_BINDINGS=$(HIP_BINDINGS); \
	    PYTHONPATH="$(CURDIR)/$(VENV)/hip-python-$(HIP_BINDINGS)"; export GPUINTEROP_TEST_HIP_BINDINGS PYTHONPATH; \
	    GPUINTEROP_TEST_VENDOR=hip $(PYTEST) tests/vendors $(ARGS) || $(NONE_SELECTED)
else
bench: VENDORS := cuda
test-hip:
	@echo "$@: there is no hip-python for this system"
endif

# Two runs that together cover each value: the build, the number and kind of devices, hip-python.
test-hip-amd: $(VENV)/.test
	@$(call ON_AMD,release) GPUINTEROP_STANDIN_DEVICES=2 GPUINTEROP_STANDIN_GFX=gfx1030 \
	    $(MAKE) --no-print-directory test-hip soak-hip HIP_BINDINGS=10.0.0.0.1.2 MINUTES=0.05
	@$(call ON_AMD,assert) GPUINTEROP_STANDIN_DEVICES=1 GPUINTEROP_STANDIN_GFX=gfx90a \
	    $(MAKE) --no-print-directory test-hip soak-hip HIP_BINDINGS=7.2.2.562.43 MINUTES=0.05

test-hip-amd-asan: $(VENV)/.test
	@$(call ON_AMD,asan) ASAN_OPTIONS=detect_leaks=0:handle_segv=0 LD_PRELOAD="$$(c++ -print-file-name=libasan.so)" \
	    $(MAKE) --no-print-directory test-hip soak-hip MINUTES=0.05

ON_AMD = [ -n "$(SOURCES)" ] || { echo "$@: SOURCES names no folder with AMD's sources" >&2; exit 2; }; \
    library=$$($(BIN)/python -m tests.simulated.amd "$(SOURCES)" $(1)); \
    echo "AMD's runtime, $(1): $$(readlink -f "$$library")"; \
    GPUINTEROP_TEST_HIP=amd GPUINTEROP_TEST_HIP_AMD="$$library"

# API errors are not reported, because the suite provokes them to test what is refused.
memcheck: $(VENV)/.test
	@compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 99 \
	    $(BIN)/python -m pytest --noconftest --pyargs gpuinterop.testing --gpuinterop-require=cuda $(ARGS)

# ARGS="-k timeline" may select tests of only one of them, so pytest's status 5 (no tests) is then no failure.
NONE_SELECTED = { status=$$?; case "$$status $${ARGS-} " in "5 "*" -k"*|"5 -k"*|"5 "*" -m"*|"5 -m"*) ;; *) exit $$status ;; esac; }

$(VENV)/cuda-bindings-%: $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.new cuda-bindings==$*
	@rm -rf $@ && mv $@.new $@

# A prefix, not a target, which would leave out MPICH's libraries: they belong to no Python package. Packages that .venv
# has are not installed again.
$(EXCHANGE): | $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location --prefix $@.new \
	    "$(TORCH)" $(MPI)
	@rm -rf $@ && mv $@.new $@

$(BESIDE): | $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location --prefix $@.new \
	    $(FRAMEWORKS)
	@rm -rf $@ && mv $@.new $@

$(RENDERING): | $(VENV)/.test
	@$(BUSY) 'installing into $(VENV)/renderers' $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
	    --prefix $@.new $(RENDERERS)
	@rm -rf $@ && mv $@.new $@

$(VENV)/hip-python-%: $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.new hip-python==$*
	@rm -rf $@ && mv $@.new $@

$(VENV)/iceoryx2-%: $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.new iceoryx2==$*
	@rm -rf $@ && mv $@.new $@

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/zizmor --offline --quiet .github
	@said=$$($(BIN)/repo-review . --show err) || { echo "$$said"; exit 1; }

types: $(VENV)/.dev
	@$(BIN)/mypy
	@$(BIN)/python -m tests.manual.typed

check: lint types test

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

wheel-check: vulkan
	@$(TESTED); PYTHON="$(PYTHON)" RELEASE="$(RELEASE)" exec tools/check_wheel.sh

vulkan:
	@$(BUSY) 'fetching Vulkan' $(PYTHON) tools/fetch_vulkan.py $(VULKAN_FLAGS)

# The backend must refuse HIP 5.
drivers:
	@$(BUSY) 'fetching Vulkan' $(PYTHON) tools/fetch_vulkan.py vulkan $(if $(filter Linux x86_64,$(SYSTEM)),hip5) $(VULKAN_FLAGS)

shaders: $(SHADERS:.comp=.spv)

# The compiler is only fetched if a shader is out of date.
%.spv: %.comp
	@$(PYTHON) tools/fetch_vulkan.py glslang --require
	@. .vulkan/env; glslangValidator -V $(GLSLFLAGS) -o $@ $<
	@echo "$@"

# A stamp is written last, and the steps before it can be repeated, so an interrupted run continues.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make a virtual environment: sudo apt install python3-venv, or its like" >&2; exit 1; }
	@$(BUSY) 'making .venv' $(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/.made $@

$(VENV)/.test: $(MADE) pyproject.toml
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[checkout,cuda]'
	@touch $@

# The simulated drivers are compiled where they run. If there is no compiler, one is installed from PyPI.
bench test-main test-kit test-manual test-workflows test-cuda test-hip test-exchange \
    soak-cuda soak-hip interrupts-cuda interrupts-hip: $(VENV)/.compiler
$(VENV)/.compiler: $(VENV)/.test
	@$(BIN)/python -c 'from gpuinterop.testing.simulated.build import compiler; compiler()' $(if $(CC_GIVEN),,2>/dev/null) || { \
	    [ -z "$(CC_GIVEN)" ] || exit 1; \
	    $(BUSY) "there is no C compiler here: fetching the one in PyPI's ziglang, 100 MB" \
	        $(BIN)/python -m pip install --quiet --disable-pip-version-check ziglang==0.17.1 || { \
	        echo "install a C compiler: apt install gcc libc6-dev, dnf install gcc, or pacman -S gcc" >&2; exit 1; }; }
	@touch $@

$(VENV)/.dev: $(MADE) pyproject.toml
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda,dev]'
	@touch $@ $(VENV)/.test

$(VENV)/.docs: $(VENV)/.test
	@$(BUSY) 'installing into $@' $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[checkout,cuda,docs]'
	@touch $@

clean:
	rm -rf $(VENV) .vulkan docs/_build docs/_generated .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find gpuinterop backends tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
