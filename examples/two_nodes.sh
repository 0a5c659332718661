#!/usr/bin/env bash
# Train on two nodes with torchrun.
#   examples/two_nodes.sh                               both "nodes" on this machine: two agents of two CPU ranks each
#   examples/two_nodes.sh node0:29500 train.py [args]   run this on each of two nodes; node0 is either of them
# NPROC sets the processes per node; by default two here, and one per GPU on a real node.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}

agent() { # one node: <endpoint> <processes> <script and arguments>
    "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node "$2" --rdzv-backend c10d \
        --rdzv-id "${RUN_ID:-moefx}" --rdzv-endpoint "$1" "${@:3}"
}

if [ $# -ge 2 ]; then
    agent "$1" "${NPROC:-gpu}" "${@:2}"
    exit
fi
[ $# -eq 0 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
endpoint=localhost:$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
agent "$endpoint" "${NPROC:-2}" "$here/train_moe.py" --steps 5 --dp 2 --ep 2 &
second=$!
status=0
agent "$endpoint" "${NPROC:-2}" "$here/train_moe.py" --steps 5 --dp 2 --ep 2 || status=$?
wait "$second" || status=$?
exit $status
