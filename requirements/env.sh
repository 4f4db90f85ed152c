#!/usr/bin/env bash
# Make the environment in $VENV (default .venv): `env.sh` installs requirements/cpu.lock,
# `env.sh vllm` the ordinary vLLM wheel for a GPU machine. Running it again does nothing
# while the lock and pyproject.toml stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/cpu.lock
venv=${VENV:-.venv}
stamp=$venv/.inspect-lens
log=$venv/install.log
kind=${1:-}
bin=$venv/bin

die() { printf 'env: %s\n' "$@" >&2; exit 1; }

find_python() {
  # 3.11 first: it is the version that the whole suite runs on.
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python}; do
    # Run it: a version manager's shim can be on the path and still have nothing behind it.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  die "needs CPython 3.11, 3.12 or 3.13, and none of '${PYTHON:-python3.11 python3 python3.12 python3.13 python}' is one." \
    "Install Python 3.11, or name an interpreter: make env PYTHON=/path/to/python3.11"
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die \
    "$("$python" --version) at '$python' has no venv module." \
    "On Debian and Ubuntu it is a package of its own: python3-venv (or python3.11-venv)."
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || echo \
    "env: $("$python" --version): the lock resolves for it; the suite is run on 3.11."
  rm -rf "$venv"
  "$python" -m venv "$venv"
}

# What pip is configured with and uv would not read by itself.
pip_option() {
  "$bin/python" -m pip config list 2>/dev/null |
    sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g' | tr -s ' ' '\n' | sed '/^$/d' | sort -u
}

uv_install() {
  local args=() source
  for source in $(pip_option find-links); do args+=(--find-links "$source"); done
  for source in $(pip_option index-url | head -n 1); do
    [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || args+=(--default-index "$source")
  done
  "$bin/python" -m uv pip install --python "$bin/python" ${args[@]+"${args[@]}"} "$@"
}

attempt() {
  printf '\n== %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1
}

install_lock() {
  # The CPU build of torch is not on PyPI. First whatever this machine's pip is configured
  # with, then PyTorch's own index, which uv knows by name, then pip with its full configuration.
  # Compiled now: an engine is three processes that import all of vLLM, and where bytecode is not
  # written (PYTHONDONTWRITEBYTECODE) each would compile it again, at half a minute apiece.
  attempt uv_install --compile-bytecode --no-deps -r "$lock" ||
    attempt uv_install --compile-bytecode --no-deps -r "$lock" --torch-backend=cpu ||
    attempt "$bin/python" -m pip install --no-deps -r "$lock" || {
    tail -n 5 "$log" | cut -c 1-300 >&2
    die "could not install $lock; the whole log is $log." \
      "If torch (+cpu) is what is missing: it is published on PyTorch's CPU index, not on PyPI." \
      "Where that index cannot be reached, put the wheel into a directory and set" \
      "PIP_FIND_LINKS=<that directory>. The lock is for Linux on x86-64 or aarch64."
  }
}

install_petri() {
  # It declares Python 3.12 and runs on 3.11, where the lock's line for it does not apply.
  local pin
  pin=$(sed -n 's/^\(inspect-petri==[^ ;]*\).*/\1/p' "$lock")
  attempt "$bin/python" -m pip install --no-deps --ignore-requires-python "$pin" || {
    tail -n 5 "$log" | cut -c 1-300 >&2
    die "could not install $pin; the log is $log."
  }
}

digest() { cat "$@" | "$bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

have=$(sed -n 1p "$stamp" 2>/dev/null || true)
if ! "$bin/python" -c 'import pip' 2>/dev/null || { [ -n "$kind" ] && [ "$kind" != "$have" ]; }; then
  make_venv
  have=
fi
# Without an argument an environment keeps the kind it was made with.
kind=${kind:-${have:-cpu}}
want=$(printf '%s\n' "$kind" "$(digest "$lock" pyproject.toml)")
[ "$want" = "$(cat "$stamp" 2>/dev/null || true)" ] && exit 0

echo "env: installing into $venv ($kind); this takes some minutes, and $log shows how far it is"
[ "$kind" = cpu ] && echo "env: at the end Python files are compiled, which prints nothing for a minute or more"
: >"$log"
rm -f "$stamp"
uv_pin=$(grep '^uv==' "$lock")
attempt "$bin/python" -m pip install --no-deps "$uv_pin" || {
  tail -n 5 "$log" >&2
  die "pip could not install $uv_pin; is a package index reachable? The log is $log."
}
if [ "$kind" = cpu ]; then
  install_lock
  install_petri
  attempt uv_install --no-deps --no-build-isolation --editable . || {
    tail -n 5 "$log" | cut -c 1-300 >&2
    die "could not install this package; the log is $log."
  }
else
  attempt uv_install --editable ".[$kind,train,docs,dev,petri,control,sentinel,scout]" openai psutil types-psutil pytest-xdist || {
    tail -n 5 "$log" | cut -c 1-300 >&2
    die "could not install the extras '$kind'; the log is $log."
  }
fi
printf '%s\n' "$want" >"$stamp"
