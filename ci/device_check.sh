#!/bin/bash
# Everything that only a GPU can show, in at most 10 minutes and without a network.
#
#   ci/device_check.sh OUT [WHEELS]
#
# OUT: an existing folder for results. WHEELS: a folder of wheels for what the machine's Python lacks.
# Needs a Python with torch and triton for the GPU (PYTHON, default python3). Each part has its own time limit and
# runs whatever became of the others; the exit status is that of the worst part.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: ci/device_check.sh OUT [WHEELS]}
wheels=${2:-}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
worst=0
export PYTHONUNBUFFERED=1 OCTAVO_CACHE_DIR=/tmp/octavo-device-check TRITON_CACHE_DIR=/tmp/octavo-device-check/triton
mkdir -p "$OCTAVO_CACHE_DIR"

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 status began
  shift 2
  echo "== $name"
  began=$SECONDS
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  echo "== $name: status $status after $((SECONDS - began)) s"
  [ "$status" -gt "$worst" ] && worst=$status
  return "$status"
}

offers() { "$python" -m octavo.core.entry.cli.main "$@" --help >/dev/null 2>&1; }


if [ -n "$wheels" ]; then
  "$python" -m pip install -q --no-index --no-deps --target /tmp/octavo-site "$wheels"/*.whl || exit 1
  export PYTHONPATH=/tmp/octavo-site
fi
part install 90 "$python" -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 1
part machine 30 bash -c 'nvidia-smi 2>/dev/null || rocm-smi 2>/dev/null || true'
part devices 60 "$python" -m octavo.core.entry.cli.main devices "$device" || exit 1

# What the kernels reach, checked first: compiling them is the largest part of it.
part attention 180 "$python" ci/bench/gpu_attention.py --device "$device:0" --json "$out/attention.json" --goals

# The whole engine against the reference backend, on the same device.
if offers backend check; then
  part conformance 150 "$python" -m octavo.core.entry.cli.main backend check triton --device "$device"
fi

model=/tmp/octavo-device-check/model
part model 60 "$python" ci/bench/random_model.py "$model"
part latency 60 "$python" -m octavo.core.entry.cli.main bench latency "$model" --device "$device" \
  --input-len 512 --output-len 64 --repeats 5 --json "$out/latency.json"
part throughput 90 "$python" -m octavo.core.entry.cli.main bench throughput "$model" --device "$device" \
  --kv-memory 8G --max-num-seqs 128 --json "$out/throughput.json"
exit "$worst"
