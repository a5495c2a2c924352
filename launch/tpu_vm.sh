#!/usr/bin/env bash
# One run on all hosts of a Cloud TPU slice, recreated and resumed when it is preempted.
#
#     launch/tpu_vm.sh [--dry-run] NAME --config=sancho --workdir=/mnt/attnlab/runs/sancho
#
# NAME is the name of the slice. Environment:
#   ZONE             e.g. us-central2-b
#   TYPE             e.g. v4-32
#   NFS              e.g. 10.0.0.2:/share, mounted at /mnt/attnlab on every host: the workdir must outlive the VMs
#   VERSION          software of the VMs; default tpu-ubuntu2204-base
#   SOURCE           folder to install from; default this repository
#   CREATE_OPTIONS   e.g. --spot
#   MIN_SECONDS      a run that fails within so many seconds is not restarted, as it would fail again; default 300
# --dry-run prints every command and runs none. The slice still exists when the run is over: delete it with the command
# that is printed last.
set -uo pipefail

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"
    exit 0
fi
dry=
if [[ ${1:-} == --dry-run ]]; then
    dry=1
    shift
fi
if (($# < 2)) || [[ -z $1 || $1 == -* || -z ${ZONE:-} || -z ${TYPE:-} || -z ${NFS:-} ]]; then
    echo "usage: ZONE=… TYPE=… NFS=… launch/tpu_vm.sh [--dry-run] NAME --config=EXPERIMENT --workdir=/mnt/attnlab/…" >&2
    exit 2
fi
name=$1
shift
source=${SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}
folder=$(mktemp -d) || exit 2 # a name in /tmp that others could foresee would be theirs to link elsewhere
trap 'rm -rf "$folder"' EXIT
packed=$folder/attnlab.tar.gz

do_() {
    printf '%q ' "$@"
    echo
    [[ $dry ]] || "$@"
}
tpu() {
    do_ gcloud compute tpus tpu-vm "$1" "$name" "--zone=$ZONE" "${@:2}"
}
state() {
    gcloud compute tpus tpu-vm describe "$name" "--zone=$ZONE" "--format=value(state)" 2>/dev/null || echo NONE
}
everywhere() {
    tpu ssh --worker=all "--command=$1"
}
make_slice() {
    # shellcheck disable=SC2086
    tpu create "--accelerator-type=$TYPE" "--version=${VERSION:-tpu-ubuntu2204-base}" ${CREATE_OPTIONS:-}
}
mount="mountpoint -q /mnt/attnlab || { sudo apt-get -qq update && sudo apt-get -qq install -y nfs-common && \
sudo mkdir -p /mnt/attnlab && sudo mount $(printf '%q' "$NFS") /mnt/attnlab; }" # quoted for the remote shell, as "$@" is below
# The image's own Python may be older than attnlab allows: uv brings one.
install="rm -rf attnlab && mkdir attnlab && tar -xzf attnlab.tar.gz -C attnlab && python3 -m pip install -q --user uv && \
python3 -m uv venv -q --clear --python 3.11 venv && \
python3 -m uv pip install -q --python venv -c attnlab/constraints.txt -e 'attnlab[data,tpu]'"
set_up() { # idempotent
    do_ tar -czf "$packed" --exclude='./.*' --exclude=./runs --exclude=./build -C "$source" . &&
        do_ gcloud compute tpus tpu-vm scp "$packed" "$name:attnlab.tar.gz" "--zone=$ZONE" --worker=all &&
        everywhere "$mount" && everywhere "$install"
}
run="cd attnlab && ATTNLAB_DISTRIBUTED=1 ../venv/bin/python -m attnlab.train $(printf '%q ' "$@")"

if [[ $dry ]]; then
    echo "# state of the slice:" && tpu describe "--format=value(state)"
    echo "# when there is none:" && make_slice
    echo "# when it is ready:" && set_up && everywhere "$run"
    echo "# when it was preempted; then as when there is none:" && tpu delete --quiet
    echo "# when it is no longer needed:" && tpu delete --quiet
    exit 0
fi
if ! command -v gcloud >/dev/null; then
    echo "launch/tpu_vm.sh: gcloud is not installed: install the Google Cloud CLI, or see the commands with --dry-run" >&2
    exit 2
fi

while true; do
    state=$(state)
    case $state in
        NONE)
            make_slice || sleep 60 # none available yet
            ;;
        READY)
            if ! set_up; then
                echo "launch/tpu_vm.sh: setting up the slice failed; the slice still exists" >&2
                exit 1
            fi
            SECONDS=0
            if everywhere "$run"; then
                break
            fi
            state=$(state)
            if [[ $state == READY ]] && ((SECONDS < ${MIN_SECONDS:-300})); then
                echo "launch/tpu_vm.sh: the run ended with an error; the slice still exists" >&2
                exit 1
            fi
            echo "launch/tpu_vm.sh: the run was interrupted, the slice is $state: resuming from the last checkpoint" >&2
            ;;
        CREATING | STARTING | RESTARTING | REPAIRING)
            sleep 20
            ;;
        *)
            echo "launch/tpu_vm.sh: the slice is $state: recreating it" >&2
            tpu delete --quiet || sleep 60
            ;;
    esac
done
echo "# when the slice is no longer needed:"
dry=1 && tpu delete --quiet
