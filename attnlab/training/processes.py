"""Distributed runs: connect the processes of a cluster through JAX's distributed runtime."""

import os
import sys

import jax

from attnlab.support.errors import UserError

# Set by launchers that JAX does not detect itself, such as `launch/local.sh`.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# Set by SLURM and Open MPI: the number of tasks.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def connect(timeout: int) -> None:
    """Connect to the other processes of a distributed run; do nothing in a single process.

    The environment variables of srun, mpirun and `launch/local.sh` indicate a distributed run. The hosts of a TPU slice
    have no such variables, so `launch/tpu_vm.sh` sets ATTNLAB_DISTRIBUTED=1, and JAX queries the TPU's metadata.
    ATTNLAB_DISTRIBUTED=0 prevents connecting. All processes must connect within `timeout` seconds.
    """
    distributed = os.environ.get("ATTNLAB_DISTRIBUTED", "")
    if distributed not in ("", "0", "1"):
        raise UserError(f"ATTNLAB_DISTRIBUTED={distributed}: expected 1 or 0: set one of them, or unset it")
    if distributed == "0":
        return
    # The training loop detects a lost process first, with a helpful message; JAX's own heartbeat would just abort.
    options = {"heartbeat_timeout_seconds": 2 * timeout, "initialization_timeout": timeout}
    if os.environ.get(ADDRESS) and os.environ.get(COUNT):
        try:
            options |= {"num_processes": int(os.environ[COUNT]), "process_id": int(os.environ[NUMBER])}
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{COUNT}={os.environ[COUNT]}, {NUMBER}={os.environ.get(NUMBER)}: expected two integers"
            ) from error
    elif distributed != "1" and not any(int(os.environ.get(name) or 1) > 1 for name in TASKS):
        return
    if len((os.environ.get("CUDA_VISIBLE_DEVICES") or ",").split(",")) == 1:
        # The launcher gave this task one GPU, which has index 0 here; JAX would use the local task number.
        options["local_device_ids"] = [0]
    try:
        jax.distributed.initialize(**options)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes did not connect within {timeout} s ({str(error).splitlines()[0]}): start all of them, "
            "and check that they can reach the first one"
        ) from error


def leave(code: int) -> None:
    """Exit this process at once: a normal exit would wait for other processes, and for background compilations."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
