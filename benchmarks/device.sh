#!/usr/bin/env bash
# Prove and measure segment attention on a machine with an NVIDIA GPU, in under four minutes:
#
#   benchmarks/device.sh [arguments of benchmarks/attention.py]
#
# Nothing is installed, and all that is missing is said. What that machine lacks can be brought along
# in build/device, made where there is a network, for that machine's Python:
#
#   pip install --target build/device --no-deps --only-binary=:all: --python-version 3.12 \
#     jax-triton==0.3.1 jaxtyping==0.3.11 wadler_lindig==0.1.8
#
# PYTHON chooses the interpreter. Logs and results go to $OUT, or out/.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-out}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/build/device${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export COLUMNS="${COLUMNS:-200}"

[ -d build/device ] || echo "No packages were brought along: there is no build/device."
timeout 30 "$python" - <<'END' || exit 1
import importlib.util, platform, sys

USES = dict(jax="nothing runs", jaxtyping="kvfunc cannot be imported",
            wadler_lindig="jaxtyping cannot be imported", rich="nothing can be printed",
            triton="the kernel for NVIDIA GPUs cannot be compiled",
            jax_triton="the kernel for NVIDIA GPUs cannot be called")
missing = [name for name in USES if importlib.util.find_spec(name) is None]
for name in missing:
    print(f"{name} is missing, so {USES[name]}.")
if not {"triton", "jax_triton"}.issuperset(missing):
    sys.exit(1)
import jax

print(f"Python {platform.python_version()}, jax {jax.__version__}, {jax.devices()[0].device_kind}.")
if jax.default_backend() != "gpu":
    print(f"No GPU is here: JAX runs on {jax.default_backend()}.")
END

timeout 105 "$python" benchmarks/attention.py --check 2>&1 | tee "$out/check.log"
checked=$?
timeout 100 "$python" benchmarks/attention.py --limit 70 --out "$out" "$@" 2>&1 \
  | tee "$out/attention.log"
measured=$?
[ "$checked" -eq 0 ] || echo "The check failed or took over 105 seconds: see $out/check.log."
[ "$measured" -eq 0 ] || echo "Not all was measured: see $out/attention.log."
exit $((checked || measured))
