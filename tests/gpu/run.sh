#!/bin/sh
# All that a card has to say about shards: tests, then the table of loads and searches. From the repository's root:
#   sh tests/gpu/run.sh OUT
# Needs cupy-cuda13x, numpy, pyarrow, pytest, pytest-timeout, hypothesis, typer and rich; wheels of anything that is missing
# (psycopg and psycopg-binary, most likely) may lie in .whl/. Leaves tests.json, tests.log, device-copy.json and .log in OUT.
out=${1:?where the reports go}
if ls .whl/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$out/site" .whl/*.whl || exit
  PYTHONPATH="$out/site:$PYTHONPATH"
fi
export PYTHONPATH="$PWD:$PYTHONPATH" PYTHONUNBUFFERED=1
export FABRIC_REQUIRE_GPU=1
FABRIC_GPU_REPORT="$out/tests.json" timeout 240 python3 -m pytest -q -m gpu -p no:cacheprovider \
  tests/gpu/test_flat_select.py tests/gpu/test_device_shard.py tests/gpu/test_row_admit.py >"$out/tests.log" 2>&1
tested=$?
tail -40 "$out/tests.log"
timeout 320 python3 -m tests.bench.device_copy --json "$out/device-copy.json" 2>&1 | tee "$out/device-copy.log"
rm -rf "$out/site"
exit $tested
