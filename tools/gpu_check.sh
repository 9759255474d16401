#!/usr/bin/env bash
# Builds torchpin against the PyTorch that python3 has and runs the tests that
# are about the accelerator on CUDA. Needs a GPU, a C++ compiler, and in that
# Python pip, setuptools, cmake, ninja, pytest and hypothesis; needs no
# network, and leaves that Python as it is: all is made in build/gpu-check.
#
#   tools/gpu_check.sh [pytest arguments]
#
# Without arguments it runs the test files that are written for "the
# accelerator", those that take its name from test/common_pin.py.
#
#   PYTHON=...   another Python than python3
#   WHEELS=...   a folder of wheels for what that Python lacks (expecttest)
#   SECONDS_ALLOWED=...   for building and testing together [350]
set -u
cd "$(dirname "$0")/.." || exit 1
exec </dev/null
python=${PYTHON:-python3}
allowed=${SECONDS_ALLOWED:-350}
work=$PWD/build/gpu-check
started=$SECONDS

fail() {
  echo "gpu_check: $*" >&2
  echo "0 passed, 1 failed"
  exit 1
}

command -v "$python" >/dev/null || fail "$python was not found"
# Asked with everything switched off: nothing installed there takes part.
seen=$(TORCHPIN=0 TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" - <<'PY'
import sys
import sysconfig

import torch

if not torch.cuda.is_available():
    sys.exit("torch.cuda.is_available() is False")
print(sysconfig.get_path("purelib"))
print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, "
      f"Python {sys.version.split()[0]}")
PY
) || fail "no PyTorch with a GPU in $python"
parent=$(sed -n 1p <<<"$seen")
echo "== $(sed -n 2p <<<"$seen")"

# An environment of its own that sees all that the other one has. It is told by
# a start-up file, since --system-site-packages means the packages of the
# interpreter, which are other ones if $python is itself in an environment.
rm -rf "$work"
mkdir -p "$work"
"$python" -m venv --without-pip "$work/env" || fail "python -m venv failed"
inside=$work/env/bin/python
site=$("$inside" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir(%s)\n' "'$parent'" >"$site/parent.pth"
export PATH="$work/env/bin:$PATH"
offline=(-m pip --disable-pip-version-check --no-input install --quiet --no-index --no-deps)
"$inside" -c 'import pip' 2>/dev/null || fail "$python has no pip"

lacking=()
for module in pytest hypothesis expecttest attrs; do
  name=$module
  [ "$module" = attrs ] && name=attr
  "$inside" -c "import $name" 2>/dev/null || lacking+=("$module")
done
if [ ${#lacking[@]} -gt 0 ]; then
  [ -n "${WHEELS:-}" ] ||
    fail "$python lacks ${lacking[*]}; name a folder with wheels of them in WHEELS"
  "$inside" "${offline[@]}" --find-links "$WHEELS" "${lacking[@]}" ||
    fail "${lacking[*]} could not be installed from $WHEELS"
fi

echo "== build"
MAX_JOBS=$(nproc)
export MAX_JOBS
for what in . test/cpp_extensions/torch_refdev; do
  "$inside" "${offline[@]}" --no-build-isolation "$what" >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log"; fail "the build of $what failed"; }
done
echo "built in $((SECONDS - started)) s"
"$inside" -m torchpin

echo "== tests on CUDA"
export TORCHPIN_TEST_ACCELERATOR=cuda
rest=$((allowed - (SECONDS - started)))
[ "$rest" -gt 10 ] || fail "no time left for the tests"
if [ $# -eq 0 ]; then
  mapfile -t files < <(grep -lwE "ACCELERATOR|accelerator_module" test/test_*.py)
  set -- "${files[@]}"
fi
timeouts=()
"$inside" -c 'import pytest_timeout' 2>/dev/null && timeouts=(--timeout=120)
timeout --kill-after=5 "$rest" "$inside" -m pytest -q -p no:cacheprovider \
  "${timeouts[@]}" "$@" 2>&1 | tee "$work/tests.log"
status=${PIPESTATUS[0]}

echo "== Summary, after $((SECONDS - started)) s"
if [ "$status" -eq 124 ]; then
  echo "the tests were stopped after $rest s"
elif [ "$status" -eq 5 ]; then
  echo "no test ran"
fi
# pytest's own last line, in the form that make test has.
counts=$(grep -E '^[=]* ?[0-9]+ (passed|failed|error|skipped).* in ' "$work/tests.log" | tail -n 1)
number() { grep -oE "[0-9]+ $1" <<<"$counts" | grep -oE '[0-9]+' || echo 0; }
failed=$(($(number failed) + $(number error)))
[ "$status" -ne 0 ] && [ "$failed" -eq 0 ] && failed=1
echo "$(number passed) passed, $failed failed, $(number skipped) skipped"
exit "$status"
