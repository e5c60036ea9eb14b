#!/usr/bin/env bash
# Builds, runs tests/gpu and prints a table of what a CUDA device does, without a network.
#
#   scripts/gpu_check.sh           needs torch >= 2.9 for CUDA, numpy and a C compiler
#   scripts/gpu_check.sh --carry   where there is a network: fetches the other wheels into
#                                  build/wheels, which goes along to the machine with the GPU
#
# PYTHON= is the interpreter, WHEELS= the folder of wheels. Exit status: 77 without a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-build/wheels}
needed=(aiofiles cffi hypothesis nvidia-ml-py psutil pydantic pytest rich safetensors setuptools typer xxhash)

main() {
	if [ "${1:-}" = --carry ]; then
		carry
		return
	fi
	if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
		echo "no CUDA device: \`$python\` has no torch that finds one; nothing was checked" >&2
		exit 77
	fi
	environment
	local bin=build/gpu_check/bin
	"$bin/python" csrc/build_aio.py >/dev/null
	"$bin/python" csrc/build_optim.py >/dev/null
	"$bin/python" -m pytest -q -m gpu tests/gpu
	"$bin/python" benchmarks/gpu_check.py --device cuda
}

# For Python 3.12 on the platform of this machine.
carry() {
	mkdir -p "$wheels"
	"$python" -m pip download --quiet --dest "$wheels" --only-binary :all: \
		--python-version 3.12 --constraint constraints.txt "${needed[@]}"
	echo "$(ls "$wheels" | wc -l) wheels are in $wheels ($(du -sh "$wheels" | cut -f1))"
}

# torch and what else the machine has is used as it is; what it lacks comes from the wheels.
environment() {
	"$python" -m venv --system-site-packages build/gpu_check
	local bin=build/gpu_check/bin package missing=()
	for package in "${needed[@]}"; do
		"$bin/python" -c "import importlib.metadata as m; m.version('$package')" 2>/dev/null ||
			missing+=("$package")
	done
	if [ ${#missing[@]} -gt 0 ]; then
		"$bin/python" -m pip install --quiet --no-index --find-links "$wheels" "${missing[@]}"
	fi
	"$bin/python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
}

main "$@"
