#!/usr/bin/env bash
# Builds, runs tests/gpu and prints a table of what a CUDA device does, without a network.
#
#   scripts/gpu_check.sh           needs Python 3.11, torch 2.9 for CUDA, numpy and a C compiler, or newer
#   scripts/gpu_check.sh --carry   where there is a network: fetches the other wheels into
#                                  build/wheels, which goes along to the machine with the GPU
#
# Takes less than four minutes: each part ends in its time, and one that fails leaves the others.
# PYTHON= is the interpreter, WHEELS= the folder of wheels. Exit status: 0, 1 if a part failed, 77
# without a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-build/wheels}
bin=build/gpu_check/bin
end_s=225 # of what all parts take; what a process needs to be ended comes on top
failed=()
# What is needed beside torch and numpy, as pyproject.toml has it.
needed=("aiofiles>=24.1" "cffi>=1.17" "hypothesis>=6.100" "nvidia-ml-py>=12" "psutil>=6"
	"pydantic>=2.10,<3" "pytest>=8.3" "rich>=13" "safetensors>=0.4.5" "setuptools>=77"
	"typer>=0.15" "xxhash>=3.5")

main() {
	if [ "${1:-}" = --carry ]; then
		carry
		return
	fi
	require_device
	environment
	# As many bits as there are repeat only where cuBLAS has one workspace for each stream.
	export CUBLAS_WORKSPACE_CONFIG=:4096:8
	# Without a compiler both have slower stand-ins, and the other parts are worth having.
	part "building the I/O engine" 60 "$bin/python" csrc/build_aio.py >/dev/null
	part "building the kernels" 60 "$bin/python" csrc/build_optim.py >/dev/null
	part "tests/gpu" 100 "$bin/python" -m pytest -q -m gpu tests/gpu
	part "the table" $end_s "$bin/python" benchmarks/gpu_check.py --device cuda
	if [ ${#failed[@]} -gt 0 ]; then
		printf 'failed: %s\n' "${failed[@]}"
		exit 1
	fi
}

# part NAME SECONDS COMMAND...: runs a command for as long as it may; others follow if it fails.
part() {
	local name=$1 limit_s=$2 left_s=$((end_s - SECONDS)) code=0
	shift 2
	[ "$left_s" -gt "$limit_s" ] || limit_s=$((left_s > 1 ? left_s : 1))
	timeout --kill-after=5 "$limit_s" "$@" || code=$?
	case $code in
	0) ;;
	124 | 137) failed+=("$name: not done after $limit_s s") ;;
	*) failed+=("$name: exit status $code") ;;
	esac
}

require_device() {
	"$python" - <<-'PROBE' || exit 77
		import sys

		def stop(what):
		    print(f"no CUDA device: {what}; nothing was checked", file=sys.stderr)
		    sys.exit(77)

		if sys.version_info < (3, 11):
		    stop(f"expected Python 3.11 or newer, found {sys.version.split()[0]}; set PYTHON=")
		try:
		    import torch
		except ImportError:
		    stop(f"`{sys.executable}` has no torch; set PYTHON= to one that has")
		if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
		    stop(f"expected torch 2.9 or newer, found {torch.__version__}")
		if not torch.cuda.is_available():
		    stop(f"torch {torch.__version__} of `{sys.executable}` finds none")
	PROBE
}

# For Python 3.12 on the platform of this machine.
carry() {
	mkdir -p "$wheels"
	"$python" -m pip download --quiet --dest "$wheels" --only-binary :all: \
		--python-version 3.12 --constraint constraints.txt "${needed[@]}"
	echo "$(ls "$wheels" | wc -l) wheels are in $wheels ($(du -sh "$wheels" | cut -f1))"
}

# torch and what else the interpreter has is used as it is, also where that is an environment
# itself; what it lacks, or has too old, comes from the wheels.
environment() {
	"$python" -m venv --clear --without-pip build/gpu_check
	"$python" - <<-'PATHS' >"$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/interpreter.pth"
		import site, sys

		own = site.getsitepackages() + [site.getusersitepackages()]
		print("\n".join(path for path in sys.path if path in own))
	PATHS
	# The interpreter's own pip: many systems have no copy of it to put into an environment.
	local install=("$python" -m pip --python "$bin/python" install --quiet --no-index)
	"${install[@]}" --find-links "$wheels" "${needed[@]}" || {
		echo "run \`scripts/gpu_check.sh --carry\` where there is a network, and bring $wheels" >&2
		exit 1
	}
	OFFLOAD_PURE=1 "${install[@]}" --no-deps --no-build-isolation --editable .
}

main "$@"
