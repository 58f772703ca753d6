#!/bin/sh
# GPU tests on a lent machine with one GPU, several at a time: an engine's start is imports and compilation in one thread.
#
#   usage: side_by_side.sh AT_A_TIME SECONDS_EACH [PYTEST_ID...]      default: tests/gpu/test_engine_volta.py, each test
#
# First, here: .venv/bin/python tests/gpu/build_four_gpus_kit.py --only site deps ptx clients analyzer
# Then as one call of the lent machine, with .kit/four/1 carried (25 s to unpack, an engine 40 to 90 s, one with Gated
# DeltaNet up to three minutes where six start at once; 26 tests six at a time took 320 s):
#
#   sh tests/gpu/four_gpus.sh .kit/four/1 && sh tests/gpu/side_by_side.sh 5 200
#
# A line a test: exit status, name, the first errors. $OUT: results.txt, report.txt (the numbers compared), logs.tar.gz.
KIT=${KIT:-/tmp/four}
OUT=${OUT:-$KIT/out}
[ $# -ge 2 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
at_a_time=$1
export SECONDS_EACH="$2"
shift 2
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
export PYTHONPATH="$KIT/site:$root/patches:$root/backend:$root/perf" VOLTRITON_KERNEL_CACHE="$KIT/ptx"
export VOLTRITON_TEST_REPORT="$OUT/report.txt" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
export PYTEST="python3 -m pytest -q --noconftest -p no:cacheprovider" TESTS="$KIT/tests"
rm -rf "$TESTS"
mkdir -p "$TESTS" "$OUT"
if [ $# -gt 0 ]; then
    printf '%s\n' "$@"
else
    $PYTEST --collect-only tests/gpu/test_engine_volta.py 2>/dev/null | grep ::
fi >"$TESTS/ids"
# shellcheck disable=SC2016  # the inner shell expands it
xargs -P "$at_a_time" -d '\n' -I{} sh -c '
    name=$(printf %s "$1" | tr -c "a-zA-Z0-9\n" _)
    timeout "$SECONDS_EACH" $PYTEST --basetemp="$TESTS/$name" "$1" >"$TESTS/$name.log" 2>&1
    echo "$? $1 $(grep "^E  " "$TESTS/$name.log" | head -n 3 | cut -c 1-300 | tr "\n" "|")"
' sh {} <"$TESTS/ids" | tee "$OUT/results.txt"
(cd "$TESTS" && find . -name "*.log" | tar czf "$OUT/logs.tar.gz" -T -)
! grep -qv "^0 " "$OUT/results.txt"
