#!/usr/bin/env bash
# One run by several processes under Open MPI.
#
#     launch/mpi.sh N --config=configs/sancho.py --workdir=/shared/runs/sancho
#
# N ranks; what follows goes to attnlab.train. MPIRUN_OPTIONS goes to mpirun, e.g. "--hostfile hosts --map-by ppr:4:node";
# PYTHON names another Python, GRACE the seconds that ranks have to save when asked to stop (120 when absent). The
# workdir must be seen by all hosts. mpirun ends all ranks when one is gone; the same command goes on from the last
# checkpoint.
set -euo pipefail

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"
    exit 0
fi
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/mpi.sh N --config=FILE [--workdir=DIR] [--config.FIELD=VALUE ...]" >&2
    exit 2
fi
count=$1
shift
if ! command -v mpirun >/dev/null; then
    echo "launch/mpi.sh: there is no mpirun: install Open MPI (Debian: openmpi-bin)" >&2
    exit 2
fi

# Asked to stop, ranks finish their step and save: mpirun's own second between SIGTERM and SIGKILL is too short.
# shellcheck disable=SC2086
exec mpirun --np "$count" --oversubscribe --bind-to none --mca odls_base_sigkill_timeout "${GRACE:-120}" \
    ${MPIRUN_OPTIONS:-} "${PYTHON:-python}" -m attnlab.train "$@"
