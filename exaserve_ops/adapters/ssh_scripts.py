"""Text that runs on nodes: shell scripts, two snippets of Python, and the service that keeps an agent up.

Scripts arrive on the standard input of `/bin/sh -s`; their arguments are quoted, and never secret. They are
written for whatever `sh` a node has, and for Python 3.6 and later, since that is what they have to report.
"""

from __future__ import annotations

import shlex

FIND_PYTHON = r"""
for name in "$@"; do
  path=$(command -v "$name" 2>/dev/null) || continue
  version=$("$path" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' </dev/null 2>/dev/null) \
    || continue
  if "$path" -c 'import venv, ensurepip' </dev/null 2>/dev/null; then makes=yes; else makes=no; fi
  echo "$path $version $makes"
done
"""
"""Arguments: names to look for. Says a line `path version yes|no` for each."""

MAKE_FOLDER = r"""
umask 077
mkdir -p -- "$1" && cd -- "$1" || exit 1
chmod 700 . || exit 1
if [ ! -f .exaserve-agent ]; then
  if [ -n "$(ls -A .)" ]; then echo "it is not empty, and was not made by us" >&2; exit 3; fi
  : > .exaserve-agent || exit 1
fi
pwd -P
df -Pk . | tail -n 1
"""
"""Argument: the folder. Says its absolute path, then its line of `df`. Exit 3: it is somebody else's."""

ACCELERATORS = r"""
if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi -L; exit; fi
if command -v rocm-smi >/dev/null 2>&1; then rocm-smi --showproductname; exit; fi
if command -v xpu-smi >/dev/null 2>&1; then xpu-smi discovery; exit; fi
exit 4
"""
"""Exit 4: none of the vendors' tools is there."""

UNPACK = r"""
set -e
umask 077
cd -- "$1"
rm -rf "versions/$2.new"
mkdir -p "versions/$2.new"
tar -xzf "$3" -C "versions/$2.new"
rm -rf "versions/$2"
mv "versions/$2.new" "versions/$2"
rm -f "$3"
"""
"""Arguments: folder, version, archive."""

MAKE_ENVIRONMENT = r"""
set -e
umask 077
folder=$1; python=$2; environment=$3; requirements=$4
shift 4
cd -- "$folder"
if [ -f "$environment/.complete" ]; then echo "already there"; exit 0; fi
rm -rf "$environment"
mkdir -p "$(dirname "$environment")"
"$python" -m venv "$environment" </dev/null
python=$environment/bin/python
"$python" -m pip install --disable-pip-version-check --no-input "$@" -r "$requirements" </dev/null
: > "$environment/.complete"
"""
"""Arguments: folder, interpreter, environment, requirements file, then options of pip."""

SWITCH = r"""
set -e
cd -- "$1"
[ -f "versions/$2/interpreter" ] || { echo "version $2 is not there" >&2; exit 1; }
rm -f current.new
ln -s "versions/$2" current.new
mv -T current.new current
ls -1t versions | grep -v -e "^$2\$" -e '\.new$' | tail -n +3 \
  | while read -r old; do rm -rf "versions/$old"; done
"""
"""Arguments: folder, version. Makes it the current one; the two before it stay for what still runs."""

JOIN = r"""
cd -- "$1" || exit 1
shift
version=$(cd current 2>/dev/null && pwd -P) || exit 1
PYTHONPATH=$version "$(cat "$version/interpreter")" -m workers.agent join "$@" </dev/null
code=$?
rm -f join-token
exit $code
"""
"""Arguments: folder, then those of `join`. The token lies in a closed file and is gone afterwards."""

CHOOSE_SERVICE = r"""
if [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ]; then echo system; exit; fi
  XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; export XDG_RUNTIME_DIR
  if systemctl --user show-environment >/dev/null 2>&1; then echo user; exit; fi
fi
echo process
"""

_FUNCTIONS = r"""
folder=$1; kind=$2; unit=$3
cd -- "$folder" || exit 1
XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; export XDG_RUNTIME_DIR
ours() { # pid, part of its command line
  [ -n "$1" ] && kill -0 "$1" 2>/dev/null && tr '\0' ' ' < "/proc/$1/cmdline" 2>/dev/null | grep -qF -- "$2"
}
end() { # pid, part of its command line, seconds
  ours "$1" "$2" || return 0
  kill -TERM "$1"; kill -CONT "$1" 2>/dev/null
  left=$(($3 * 5))
  while ours "$1" "$2" && [ "$left" -gt 0 ]; do sleep 0.2; left=$((left - 1)); done
  if ours "$1" "$2"; then echo "$1 did not end in $3 s: killed"; kill -KILL "$1"; fi
}
agent_pid() { cat home/run/agent.lock 2>/dev/null; }
ctl() { if [ "$kind" = user ]; then systemctl --user "$@"; else systemctl "$@"; fi; }
stop_service() {
  # One that was stopped by a signal would not hear that it is to end.
  if ours "$(agent_pid)" "$folder/home"; then kill -CONT "$(agent_pid)"; fi
  if [ "$kind" = process ]; then end "$(cat supervisor.pid 2>/dev/null)" "$folder/supervise.sh" 25
  else ctl stop "$unit" 2>/dev/null; fi
  # The agent itself, where nobody watched over it or it did not listen. Its replicas go on.
  end "$(agent_pid)" "$folder/home" 10
}
start_service() {
  if [ "$kind" = process ]; then
    if command -v setsid >/dev/null 2>&1; then leader=setsid; else leader=nohup; fi
    $leader sh "$folder/supervise.sh" </dev/null >/dev/null 2>&1 &
  else ctl start "$unit"; fi
}
"""

START_SERVICE = (
    _FUNCTIONS
    + r"""
if [ "$kind" != process ]; then
  if [ "$kind" = user ]; then units=$HOME/.config/systemd/user; else units=/etc/systemd/system; fi
  mkdir -p "$units" && cp "$unit" "$units/$unit" && ctl daemon-reload && ctl enable "$unit" || exit 1
  if [ "$kind" = user ]; then
    loginctl enable-linger 2>/dev/null || echo "no lingering: the agent ends when this user signs out"
  fi
fi
stop_service
start_service || exit 1
echo "$kind"
"""
)
"""Arguments: folder, kind, unit. Stops what runs of it, then starts it."""

UNINSTALL = (
    _FUNCTIONS
    + r"""
stop_service
if [ "$kind" != process ]; then
  ctl disable "$unit" 2>/dev/null
  if [ "$kind" = user ]; then units=$HOME/.config/systemd/user; else units=/etc/systemd/system; fi
  rm -f "$units/$unit"
  ctl daemon-reload
fi
version=$(cd current 2>/dev/null && pwd -P)
if [ -n "$version" ] && [ -f home/journal.sqlite3 ]; then
  PYTHONPATH=$version "$(cat "$version/interpreter")" -m workers.agent stop-replicas \
    --home "$folder/home" </dev/null || { echo "some replicas are still there" >&2; exit 1; }
fi
[ -f .exaserve-agent ] || { echo "$folder was not made by us: left as it is" >&2; exit 1; }
cd / && rm -rf -- "$folder" || exit 1
echo "gone"
"""
)
"""Arguments: folder, kind, unit. Stops agent and replicas, and removes the folder if it is ours."""

READ_IDENTITY = r"""
import json, sys
try:
    with open(sys.argv[1]) as file:
        found = json.load(file)
except OSError:
    found = {}
except ValueError:
    found = {"damaged": True}
# The key stays where it is: only who the node is leaves this machine.
print(json.dumps({"node_id": found.get("node_id", ""), "joined": bool(found.get("node_key")),
                  "damaged": bool(found.get("damaged"))}))
"""
"""Argument: the identity file."""

PROBE_NETWORK = r"""
import json, os, socket, sys
try:
    from urllib.error import HTTPError
    from urllib.request import urlopen
except ImportError:
    sys.exit(5)

wish = json.load(open(0))

def ports():
    free = 0
    for port in range(wish["port_min"], wish["port_max"] + 1):
        with socket.socket() as probe:
            try:
                probe.bind((wish["bind"], port))
            except OSError:
                continue
        free += 1
        if free >= wish["enough"]:
            break
    return free

def redis():
    if wish["redis_path"]:
        return "" if os.path.exists(wish["redis_path"]) else "its socket file is not on this machine"
    try:
        with socket.create_connection((wish["redis_host"], wish["redis_port"]), 5) as link:
            link.settimeout(5)
            if wish["redis_tls"]:
                return ""
            link.sendall(b"PING\r\n")
            answer = link.recv(64)
            return "" if answer[:1] in (b"+", b"-") else "something else answers there"
    except OSError as error:
        return str(error)

def control():
    try:
        with urlopen(wish["control_url"] + "/healthz", timeout=8) as answer:
            return "" if answer.status == 200 else "status %d" % answer.status
    except HTTPError as error:
        return "status %d" % error.code
    except (OSError, ValueError) as error:
        return str(error)

answer = {}
if wish["what"] == "ports":
    answer["free"] = ports()
else:
    answer = {"redis": redis(), "control": control()}
print(json.dumps(answer))
"""
"""What to try comes as JSON on its standard input; addresses only, no passwords."""


def run_script(folder: str) -> str:
    """The script that runs the agent of the current version in the foreground."""
    return f"""#!/bin/sh
# Runs the agent. Written by ExaServe Ops; an upgrade writes it again.
cd {shlex.quote(folder + "/current")} || exit 1
# The real folder, so that a later upgrade does not mix two versions in one process.
version=$(pwd -P)
PYTHONPATH=$version
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
exec "$(cat "$version/interpreter")" -m workers.agent run --home {shlex.quote(folder + "/home")}
"""


def supervise_script(folder: str) -> str:
    """The restart loop for nodes without systemd: in a session of its own, with a pid file."""
    return f"""#!/bin/sh
# Keeps the agent up where no systemd does. SIGTERM ends both; replicas go on.
cd {shlex.quote(folder)} || exit 1
umask 077
echo $$ > supervisor.pid
stopping=
child=
trap 'stopping=yes; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null' TERM INT
trap '' HUP
pause=1
while [ -z "$stopping" ]; do
  if [ -f agent.log ] && [ "$(wc -c < agent.log)" -gt 16777216 ]; then mv -f agent.log agent.log.1; fi
  began=$(date +%s)
  sh run-agent.sh >> agent.log 2>&1 </dev/null &
  child=$!
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  [ -n "$stopping" ] && break
  if [ $(($(date +%s) - began)) -gt 60 ]; then pause=1; fi
  sleep "$pause" &
  wait $!
  pause=$((pause * 2)); [ "$pause" -gt 30 ] && pause=30
done
rm -f supervisor.pid
"""


def systemd_unit(folder: str, *, user_unit: bool) -> str:
    """A unit that restarts the agent and never touches its replicas."""
    target = "default.target" if user_unit else "multi-user.target"
    return f"""[Unit]
Description=ExaServe agent in {folder}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh "{folder}/run-agent.sh"
Restart=always
RestartSec=2
# Replicas outlive their agent and are adopted by the next one.
KillMode=process
TimeoutStopSec=30
LimitNOFILE=1048576

[Install]
WantedBy={target}
"""
