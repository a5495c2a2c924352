#!/usr/bin/env bash
# One run by several processes under Open MPI.
#
#     launch/mpi.sh N --config=sancho --workdir=/shared/runs/sancho
#
# N ranks; further options go to `attnlab train`. MPIRUN_OPTIONS goes to mpirun, e.g. "--hostfile hosts --map-by
# ppr:4:node". PYTHON selects another Python, GRACE the seconds that ranks have to save when stopped (default 120). All
# hosts need access to the workdir. mpirun ends all ranks when one dies; the same command resumes from the last
# checkpoint.
set -euo pipefail

source "$(dirname "$0")/arguments.sh"
if ! command -v mpirun >/dev/null; then
    echo "launch/mpi.sh: mpirun is not installed: install Open MPI (Debian: openmpi-bin)" >&2
    exit 2
fi

# Ranks that are stopped finish their step and save: mpirun's default of one second before SIGKILL is too short.
# shellcheck disable=SC2086
exec mpirun --np "$count" --oversubscribe --bind-to none --mca odls_base_sigkill_timeout "${GRACE:-120}" \
    ${MPIRUN_OPTIONS:-} "${PYTHON:-python}" -m attnlab.train "$@"
