#!/usr/bin/env bash
# One run on all hosts of a Cloud TPU slice, made again and resumed when it is preempted.
#
#     launch/tpu_vm.sh [--dry-run] NAME --config=configs/sancho.py --workdir=/mnt/attnlab/runs/sancho
#
# NAME is the slice's. The environment says the rest:
#   ZONE      e.g. us-central2-b
#   TYPE      e.g. v4-32
#   VERSION   software of the VMs; tpu-ubuntu2204-base when absent
#   NFS       e.g. 10.0.0.2:/share, mounted at /mnt/attnlab on every host: the workdir must outlive the VMs
#   SOURCE    what to install; this folder when absent
#   CREATE_OPTIONS   e.g. --spot
# --dry-run prints every command and runs none. The slice stays when the run is over: delete it by the command that is
# printed last.
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
    dry=1
    shift
fi
if [[ -z ${1:-} || $1 == -* || -z ${ZONE:-} || -z ${TYPE:-} || -z ${NFS:-} ]]; then
    echo "usage: ZONE=… TYPE=… NFS=… launch/tpu_vm.sh [--dry-run] NAME --config=FILE --workdir=/mnt/attnlab/…" >&2
    exit 2
fi
name=$1
shift
source=${SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}

do_() {
    printf '%q ' "$@"
    echo
    [[ $dry ]] || "$@"
}
tpu() {
    do_ gcloud compute tpus tpu-vm "$1" "$name" "--zone=$ZONE" "${@:2}"
}
state() {
    gcloud compute tpus tpu-vm describe "$name" "--zone=$ZONE" '--format=value(state)' 2>/dev/null || echo NONE
}
everywhere() {
    tpu ssh --worker=all "--command=$1"
}
make_slice() {
    # shellcheck disable=SC2086
    tpu create "--accelerator-type=$TYPE" "--version=${VERSION:-tpu-ubuntu2204-base}" ${CREATE_OPTIONS:-}
    everywhere "sudo apt-get -qq install -y nfs-common && sudo mkdir -p /mnt/attnlab && sudo mount $NFS /mnt/attnlab"
    do_ gcloud compute tpus tpu-vm scp --recurse "$source" "$name:attnlab" "--zone=$ZONE" --worker=all
    everywhere "python3 -m venv venv && venv/bin/pip install -q -c attnlab/constraints.txt -e 'attnlab[tpu]'"
}

if ! [[ $dry ]] && ! command -v gcloud >/dev/null; then
    echo "launch/tpu_vm.sh: there is no gcloud: install the Google Cloud CLI, or see the commands by --dry-run" >&2
    exit 2
fi
run="cd attnlab && ATTNLAB_DISTRIBUTED=1 ../venv/bin/python -m attnlab.train $(printf '%q ' "$@")"

if [[ $dry ]] || [[ $(state) == NONE ]]; then
    make_slice
fi
until everywhere "$run"; do
    case $(state) in
        READY)
            echo "launch/tpu_vm.sh: the run ended with an error; the slice is still there" >&2
            exit 1
            ;;
        *)
            echo "launch/tpu_vm.sh: the slice is gone: making it again, the run goes on from its last checkpoint" >&2
            tpu delete --quiet || true
            make_slice
            ;;
    esac
done
if [[ $dry ]]; then
    echo "# when the slice is preempted:"
    tpu delete --quiet
    make_slice
    everywhere "$run"
fi
echo "# when it is no longer needed:"
dry=1 tpu delete --quiet
