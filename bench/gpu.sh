#!/usr/bin/env bash
# All that needs an NVIDIA GPU: tests, compute-sanitizer, repeated runs, benchmarks. In under ten minutes.
#   bench/gpu.sh OUTDIR     PYTHON=… names the interpreter, COMMIT=… the commit of a copy without git
set -euo pipefail
[ $# = 1 ] || { echo "usage: [PYTHON=python3] [COMMIT=…] $0 OUTDIR" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m bench.gpu run "$out"
