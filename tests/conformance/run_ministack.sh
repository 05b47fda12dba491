#!/bin/sh
# The conformance suite on ministack, in an environment of its own: its dependencies are not ours.
# Usage: run_ministack.sh PYTHON      (the interpreter that has the tests' packages)
set -eu
python=${1:-python3}
work=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check ministack==1.5.33
port=$("$python" -c 'from deltastore.testing.server_process import free_port; print(free_port())')
mkdir "$work/run"
cd "$work/run"
BIND_HOST=127.0.0.1 GATEWAY_PORT=$port EDGE_PORT=$port MINISTACK_PORT=$port S3_PERSIST=0 \
  "$work/venv/bin/ministack" >"$work/log" 2>&1 &
server=$!
cd - >/dev/null
"$python" tests/conformance/wait_for_s3.py "http://127.0.0.1:$port" any any || { cat "$work/log"; exit 1; }
S3_ENDPOINT=http://127.0.0.1:$port S3_ACCESS_KEY=any S3_SECRET_KEY=any \
  "$python" -m pytest -q -m outside tests/conformance/test_stores_outside.py
