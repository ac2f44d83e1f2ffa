#!/usr/bin/env bash
# All that needs an NVIDIA GPU, in parts: tests, compute-sanitizer, repeated runs, benchmarks.
#   bench/gpu.sh OUTDIR [--seconds N] [--only PART…] [--rehearse]
# One call, of 570 seconds unless others are given, has all parts, those first that tell most.
# PYTHON=… names the interpreter, COMMIT=… the commit of a copy without git, and SPARSESCAN_KERNELS=… a folder that
# `python -m bench.gpu_kernels FOLDER` has filled elsewhere: those kernels need not be compiled.
set -euo pipefail
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || {
  echo "usage: [PYTHON=python3] [COMMIT=…] $0 OUTDIR [--seconds N] [--only PART…] [--rehearse]" >&2
  exit 2
}
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m bench.gpu run "$out" "$@"
