#!/usr/bin/env bash
# One run by several processes on this machine.
#
#     launch/local.sh N --config=quickstart --workdir=runs/two
#
# N processes, each with at least one core, and with one GPU if there are enough; further options go to `attnlab train`.
# PYTHON selects another Python. Ctrl-C and SIGTERM stop all processes with the state saved; the same command resumes.
# The exit code is that of the first failure.
set -uo pipefail

source "$(dirname "$0")/arguments.sh"
python=${PYTHON:-python}

cores=$(getconf _NPROCESSORS_ONLN)
if ((${#count} > 6 || count > cores)); then # longer numbers overflow
    echo "launch/local.sh: $count processes need a core each, and this machine has $cores: use $cores or fewer" >&2
    exit 2
fi
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

code=0 failed=0
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
            # A process that has failed, or was killed, leaves the others waiting for it.
            if ((status != 143 && status != 130)); then
                kill -TERM "${processes[@]}" 2>/dev/null
                failed=$SECONDS
            fi
        fi
    done
    # Before its first step a process does not notice that.
    ((failed && SECONDS - failed > 60)) && kill -KILL "${processes[@]}" 2>/dev/null
done
if ((code == 75 || code > 128)); then
    echo "launch/local.sh: a process ended with $code; the same command resumes from the last checkpoint" >&2
fi
exit "$code"
