#!/usr/bin/env bash
# One run by several processes on this machine.
#
#     launch/local.sh N --config=configs/quickstart.py --workdir=runs/two
#
# N processes, one GPU each where there are GPUs; what follows goes to attnlab.train. PYTHON names another Python.
# Ctrl-C and SIGTERM stop all of them with their state saved; the same command goes on. Exits with the first failure.
set -uo pipefail

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"
    exit 0
fi
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/local.sh N --config=FILE [--workdir=DIR] [--config.FIELD=VALUE ...]" >&2
    exit 2
fi
count=$1
shift
python=${PYTHON:-python}

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') || exit 2
export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)

set -m # each process in a group of its own: Ctrl-C reaches them once, through the trap
processes=()
trap 'kill -TERM "${processes[@]}" 2>/dev/null' TERM INT
for ((number = 0; number < count; number++)); do
    if ((gpus >= count)); then
        export JAX_LOCAL_DEVICE_IDS=$number
    fi
    JAX_PROCESS_ID=$number "$python" -m attnlab.train "$@" &
    processes+=($!)
done

code=0
while ((${#processes[@]})); do
    sleep 0.2
    for number in "${!processes[@]}"; do
        if kill -0 "${processes[number]}" 2>/dev/null; then
            continue
        fi
        wait "${processes[number]}"
        status=$?
        unset "processes[number]"
        if ((status && !code)); then
            code=$status
            # A process that has failed, or is gone, leaves the others waiting for it.
            ((status == 143 || status == 130)) || kill -TERM "${processes[@]}" 2>/dev/null
        fi
    done
done
if ((code == 75 || code > 128)); then
    echo "launch/local.sh: a process ended with $code; the same command goes on from the last checkpoint" >&2
fi
exit "$code"
