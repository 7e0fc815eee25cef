#!/bin/sh
# All that a card has to say about the runtime: every test of tests/gpu but vLLM's, then the account of a long run and what starts
# a step soonest. From the repository's root:
#   sh tests/gpu/run_runtime.sh OUT [SECONDS OF THE RUN]
# Needs what run.sh needs, torch and transformers; wheels of anything that is missing (psycopg, psycopg-binary, gguf and
# google-crc32c, most likely) may lie in .whl/, or in the folder WHEELS. Leaves tests-*.log and .json, runtime.json and .log and
# doorbell.json and .log in OUT. The tests run three processes at once, the measurements alone.
out=${1:?where the reports go}
seconds=${2:-65}
wheels=${WHEELS:-.whl}
if ls "$wheels"/*.whl >/dev/null 2>&1; then
  site=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl || exit
  PYTHONPATH="$site:$PYTHONPATH"
fi
export PYTHONPATH="$PWD:$PYTHONPATH" PYTHONUNBUFFERED=1 FABRIC_REQUIRE_GPU=1

tested() { # NAME FILE...
  name=$1
  shift
  FABRIC_GPU_REPORT="$out/tests-$name.json" timeout 240 python3 -m pytest -q -m gpu -p no:cacheprovider -o filterwarnings=default \
    "$@" >"$out/tests-$name.log" 2>&1
}
here=tests/gpu
tested kernels $here/test_csr_centroid.py $here/test_csr_radius.py $here/test_row_admit.py &
kernels=$!
tested shards $here/test_flat_select.py $here/test_device_shard.py $here/test_health_on_cuda.py $here/test_calls_on_cuda.py &
shards=$!
tested engine $here/test_transformers_on_cuda.py
failed=$?
wait $kernels || failed=1
wait $shards || failed=1
tail -n 3 "$out"/tests-*.log

timeout $((seconds + 120)) python3 -m tests.bench.runtime_on_cuda --compiled --seconds "$seconds" --json "$out/runtime.json" \
  >"$out/runtime.log" 2>&1 || failed=1
cat "$out/runtime.log"
timeout 90 python3 -m tests.bench.doorbell_on_cuda --json "$out/doorbell.json" 2>&1 | tee "$out/doorbell.log"
exit $failed
