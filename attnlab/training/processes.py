"""Several processes that train together: JAX's distributed runtime, when a cluster is there."""

import os
import sys

import jax

from attnlab.errors import UserError

# A launcher that JAX does not know sets these three; `launch/local.sh` does.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What SLURM and Open MPI tell each task of several.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

_connected = False


def connect(timeout: int) -> None:
    """Joins the other processes, where this one was started as one of several; else does nothing.

    Under SLURM's srun, Open MPI's mpirun and with `launch/local.sh` that shows in the environment. On the hosts of a
    TPU slice it does not: `launch/tpu_vm.sh` sets ATTNLAB_DISTRIBUTED=1, and JAX asks the machine. 0 forbids it.

    Args:
      timeout: seconds in which all must come.

    Raises:
      UserError: the environment is contradictory, or the others did not come.

    >>> connect(timeout=60)  # alone
    """
    global _connected
    wish = os.environ.get("ATTNLAB_DISTRIBUTED", "")
    if wish not in ("", "0", "1"):
        raise UserError(f"ATTNLAB_DISTRIBUTED={wish}: expected 1 or 0, or leave it out")
    if wish == "0":
        return
    # A lost process is noticed by the loop, which can say what to do; JAX, which aborts, comes second.
    options = {"heartbeat_timeout_seconds": 2 * timeout, "initialization_timeout": timeout}
    if os.environ.get(ADDRESS) and os.environ.get(COUNT):
        try:
            options |= {"num_processes": int(os.environ[COUNT]), "process_id": int(os.environ[NUMBER])}
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{COUNT}={os.environ[COUNT]}, {NUMBER}={os.environ.get(NUMBER)}: expected two whole numbers"
            ) from error
    elif wish != "1" and not any(int(os.environ.get(name) or 1) > 1 for name in TASKS):
        return
    if len((os.environ.get("CUDA_VISIBLE_DEVICES") or ",").split(",")) == 1:
        # The launcher gave this task one GPU; JAX would look for one a task of the node.
        options["local_device_ids"] = [0]
    try:
        jax.distributed.initialize(**options)
        _connected = True
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes did not come together within {timeout} s ({str(error).splitlines()[0]}): start all of "
            "them, and see that they can reach the first"
        ) from error


def leave(code: int) -> None:
    """Ends one process of several that failed; the usual way out would wait for the others. Else does nothing."""
    if _connected:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
