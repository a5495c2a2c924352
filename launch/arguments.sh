# Sourced by local.sh and mpi.sh: --help prints the comment at the top of the script; the first argument becomes $count.

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"
    exit 0
fi
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/$(basename "$0") N --config=EXPERIMENT [--workdir=DIR] [--config.FIELD=VALUE ...]" >&2
    exit 2
fi
count=$1
shift
