#!/bin/sh
# The conformance suite on a Ceph radosgw: one monitor, one OSD in memory, no authentication between
# them. Needs the packages radosgw ceph-mon ceph-osd ceph-common, and 4 GB of memory.
# Usage: run_radosgw.sh PYTHON      (the interpreter that has the tests' packages)
set -eu
python=${1:-python3}
access=deltastore-test
secret=deltastore-test-secret
for program in monmaptool ceph-mon ceph-osd radosgw radosgw-admin; do
  command -v "$program" >/dev/null || {
    echo "no $program: apt-get install radosgw ceph-mon ceph-osd ceph-common" >&2
    exit 1
  }
done
work=$(mktemp -d)
gateway=
cleanup() {
  if [ -n "$gateway" ]; then kill "$gateway" 2>/dev/null || true; wait "$gateway" 2>/dev/null || true; fi
  # Read first: a daemon removes its file while it is still going down, which takes seconds.
  daemons=$(cat "$work"/run/*.pid 2>/dev/null || true)
  for pid in $daemons; do kill "$pid" 2>/dev/null || true; done
  for pid in $daemons; do
    for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" 2>/dev/null || continue 2; sleep 1; done
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ports=$("$python" -c 'from deltastore.testing.server_process import free_port as f; print(f(), f())')
port=${ports% *}
monitor=${ports#* }
fsid=$("$python" -c 'import uuid; print(uuid.uuid4())')
osd=$("$python" -c 'import uuid; print(uuid.uuid4())')
mkdir "$work/mon" "$work/osd" "$work/run" "$work/log" "$work/rgw"
cat >"$work/ceph.conf" <<C
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$monitor/0]
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
run dir = $work/run
log file = $work/log/\$name.log
admin socket = $work/run/\$name.\$pid.asok
pid file = $work/run/\$name.pid
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
[mon.a]
mon data = $work/mon
mon data avail warn = 1
mon data avail crit = 1
[osd.0]
osd data = $work/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 1073741824
[client]
ms mon client mode = crc
rgw data = $work/rgw
rgw frontends = beast endpoint=127.0.0.1:$port
rgw relaxed region enforcement = true
C
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$monitor]" "$work/monmap" >/dev/null
ceph-mon -c "$work/ceph.conf" -i a --mkfs --monmap "$work/monmap"
ceph-mon -c "$work/ceph.conf" -i a
ceph -c "$work/ceph.conf" osd new "$osd" >/dev/null
ceph-osd -c "$work/ceph.conf" -i 0 --mkfs --osd-uuid "$osd" 2>/dev/null
ceph-osd -c "$work/ceph.conf" -i 0
radosgw-admin -c "$work/ceph.conf" user create --uid=test --display-name=test \
  --access-key=$access --secret=$secret >/dev/null 2>"$work/log/admin.log"
radosgw -c "$work/ceph.conf" -n client.admin -f >"$work/log/radosgw" 2>&1 &
gateway=$!
"$python" tests/conformance/wait_for_s3.py "http://127.0.0.1:$port" $access $secret || {
  cat "$work/log/radosgw"
  exit 1
}
S3_ENDPOINT=http://127.0.0.1:$port S3_ACCESS_KEY=$access S3_SECRET_KEY=$secret \
  "$python" -m pytest -q -m outside tests/conformance/test_stores_outside.py
