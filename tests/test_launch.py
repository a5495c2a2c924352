"""The launchers with real processes: locally, under Open MPI, under SLURM, and the dry run for TPU VMs."""

import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from attnlab import train
from attnlab.training import metrics
from tests.runs import REPOSITORY, flags, records

LAUNCH = REPOSITORY / "launch"
FIELDS = {
    "steps": 40, "precision": "float32", "batch_size": 8, "model.num_layers": 2, "model.width": 32,
    "model.context": 32, "model.dropout": 0.1, "eval.every": 10, "eval.windows": 16, "checkpoint.every": 8,
    "log.every": 2, "log.tensorboard": False, "sample.every": 0, "sample.length": 8, "parallel.timeout": 120,
    "optimizer.learning_rate": 1e-3,  # larger rates amplify the rounding of reordered sums
}  # fmt: skip
LONG = FIELDS | {"steps": 320, "checkpoint.every": 80, "eval.every": 80}
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "XLA_FLAGS": ""}
ENVIRONMENT |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def arguments(workdir, fields=FIELDS):
    return [f"--config={REPOSITORY}/configs/quickstart.py", *flags(fields), f"--workdir={workdir}"]


def started(*command, **options):
    """A process whose output goes to a pipe."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    return subprocess.Popen(list(map(str, command)), cwd=REPOSITORY, env=ENVIRONMENT | options, **output)


def run(*command, **options):
    process = started(*command, **options)
    try:
        out, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()
        pytest.fail(f"still running after five minutes:\n{process.communicate()[0]}")
    return process.returncode, out


def wait_for_step(step, workdir, within=120):
    """Waits until a run has logged a step."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if any(record["step"] >= step for record in metrics.read(Path(workdir) / "metrics.jsonl")):
            return
        time.sleep(0.05)
    pytest.fail(f"{workdir} did not reach step {step}")


def losses(workdir):
    return [record["loss"] for record in records(workdir)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    code, out = run(sys.executable, "-m", "attnlab.train", *arguments(workdir))
    assert code == 0, out
    return workdir


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The long run of two processes, undisturbed."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    code, out = run(LAUNCH / "local.sh", 2, *arguments(workdir, LONG))
    assert code == 0, out
    return workdir


NO_MPI = pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed (Debian: openmpi-bin)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, options",
    [
        pytest.param("mpi.sh", {"parallel.mesh.fsdp": 2}, marks=NO_MPI),
        pytest.param("local.sh", {"parallel.mesh.context": 2}, marks=pytest.mark.campaign),
        pytest.param("local.sh", {"parallel.strategy": "pmap"}, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_two_processes_equal_one(alone, tmp_path, launcher, options):
    code, out = run(LAUNCH / launcher, 2, *arguments(tmp_path / "run", FIELDS | options))
    assert code == 0, out
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(alone), rtol=1e-6)
    assert [r["step"] for r in records(tmp_path / "run")] == [r["step"] for r in records(alone)]
    assert out.count("training tokens") == 1, "only the first process prints"


@pytest.mark.slow
def test_two_local_processes_end_early_at_the_same_step(tmp_path):
    """At this learning rate no parameter changes, so the validation loss stays the same."""
    still = FIELDS | {"eval.patience": 2, "optimizer.learning_rate": 1e-30}
    code, out = run(LAUNCH / "local.sh", 2, *arguments(tmp_path / "run", still))
    assert code == 0 and out.count("stopped early at step 30 of 40") == 1, out
    assert [r["step"] for r in records(tmp_path / "run") if r["split"] == "final"] == [30]


@pytest.mark.slow
def test_sigterm_stops_both_processes_after_the_same_step(two, tmp_path):
    """Both resume as if never stopped; a single process resumes up to rounding."""
    process = started(LAUNCH / "local.sh", 2, *arguments(tmp_path / "run", LONG))
    wait_for_step(40, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and re.search(r"stopped: step \d+ is saved", out), out
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    for command, name in (([LAUNCH / "local.sh", 2], "run"), ([sys.executable, "-m", "attnlab.train"], "alone")):
        code, out = run(*command, *arguments(tmp_path / name, LONG))
        assert code == 0 and "resumed from step" in out, out
    assert records(tmp_path / "run") == records(two)
    np.testing.assert_allclose(losses(tmp_path / "alone"), losses(two), rtol=1e-5)  # reordered sums over 320 steps


@pytest.mark.slow
def test_killed_process_ends_the_other_and_restart_is_exact(two, tmp_path):
    process = started(LAUNCH / "local.sh", 2, *arguments(tmp_path / "run", LONG))
    wait_for_step(100, tmp_path / "run")
    command = ["pgrep", "-f", "-P", str(process.pid), "attnlab.train"]
    children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (75, 137), out  # whichever is noticed first
    assert "error: another process is gone (" in out and "): start all of them again with the same command" in out
    assert "the same command resumes from the last checkpoint" in out
    code, out = run(LAUNCH / "local.sh", 2, *arguments(tmp_path / "run", LONG))
    assert code == 0 and "resumed from step 80" in out, out
    assert records(tmp_path / "run") == records(two)


def test_launcher_without_arguments_prints_its_usage():
    for name in ("local.sh", "mpi.sh"):
        for words in ([], ["0"], ["--config=configs/quickstart.py"]):
            code, out = run(LAUNCH / name, *words)
            assert code == 2 and out.startswith(f"usage: launch/{name} N --config=EXPERIMENT")
    for count in (100_000, 2**64 + 1):
        code, out = run(LAUNCH / "local.sh", count, "--config=quickstart")
        expected = r"launch/local.sh: \d+ processes need a core each, .* use \d+ or fewer\n"
        assert code == 2 and re.fullmatch(expected, out)
    code, out = run(LAUNCH / "tpu_vm.sh", "name")
    assert code == 2 and out.startswith("usage: ZONE=… TYPE=… NFS=…")


SLICE = {"ZONE": "us-central2-b", "TYPE": "v4-32"}
SANCHO = ("sancho", "--config=configs/sancho.py", "--workdir=/mnt/attnlab/runs/sancho")


def test_tpu_dry_run_prints_every_command(tmp_path):
    options = SLICE | {"NFS": "10.0.0.2:/a share; id", "TMPDIR": str(tmp_path)}
    code, out = run(LAUNCH / "tpu_vm.sh", "--dry-run", *SANCHO, **options)
    assert code == 0
    lines = [line for line in out.splitlines() if not line.startswith(("#", "tar "))]
    assert all(line.startswith("gcloud compute tpus tpu-vm ") for line in lines)
    assert [line.split()[4] for line in lines] == ["describe", "create", "scp", "ssh", "ssh", "ssh", "delete", "delete"]
    assert "--worker=all" in lines[5] and "ATTNLAB_DISTRIBUTED=1" in lines[5] and SANCHO[-1] in lines[5]
    (mount,) = (word for word in shlex.split(lines[3]) if "sudo mount" in word)
    assert shlex.split(mount)[-3:] == ["10.0.0.2:/a share; id", "/mnt/attnlab;", "}"]
    packed = re.search(r"tar -czf (\S+)", out)[1]
    assert packed.startswith(f"{tmp_path}/tmp.") and not os.listdir(tmp_path)


GCLOUD = """#!/usr/bin/env bash
# Simulates a slice that is preempted once: requests are appended to one file, its state is read from another.
set -u
cd "$(dirname "$0")"
echo "$4" >> requests
case $4 in
    describe) [[ -e state ]] && cat state ;;
    create) echo READY > state ;;
    delete) rm state ;;
    ssh) if [[ $* == *attnlab.train* && ! -e preempted ]]; then echo PREEMPTED | tee state > preempted; exit 255; fi ;;
esac
"""


def test_tpu_launcher_recreates_a_preempted_slice(tmp_path):
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)
    options = SLICE | {"NFS": "10.0.0.2:/share", "TMPDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code, out = run(LAUNCH / "tpu_vm.sh", *SANCHO, **options)
    assert code == 0, out
    assert "the run was interrupted, the slice is PREEMPTED: resuming from the last checkpoint" in out
    requests = (tmp_path / "requests").read_text().replace("describe\n", "").split()
    assert requests == ["create", "scp", "ssh", "ssh", "ssh", "delete", "create", "scp", "ssh", "ssh", "ssh"]
    (tmp_path / "preempted").unlink()
    (tmp_path / "gcloud").write_text(GCLOUD.replace("PREEMPTED", "READY"))
    code, out = run(LAUNCH / "tpu_vm.sh", *SANCHO, **options)
    assert code == 1 and "the run ended with an error; the slice still exists" in out, out


def test_slurm_dry_run_prints_its_command():
    code, out = run("bash", LAUNCH / "slurm.sbatch", "--dry-run", "--config=sancho", "--workdir=a b", PYTHON="python")
    assert (code, out) == (0, "srun --kill-on-bad-exit=1 python -m attnlab.train --config=sancho --workdir=a\\ b \n")


@pytest.mark.parametrize("name", ["local.sh", "mpi.sh", "slurm.sbatch", "tpu_vm.sh"])
def test_launcher_help_is_its_header(name):
    code, out = run("bash", LAUNCH / name, "--help")
    assert code == 0 and f"launch/{name}" in out and not re.search("^#|SBATCH", out, re.M)


def test_contradictory_environment_prints_one_line(tmp_path, capsys, monkeypatch):
    environment = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert train.main(["train", *arguments(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert out == "starting the devices\n"
    assert err.startswith("error: JAX_NUM_PROCESSES=two, JAX_PROCESS_ID=0: ") and err.count("\n") == 1


DAEMONS = ("munged", "slurmctld", "slurmd")


def free_port():
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def slurm():
    """The environment of a SLURM cluster on this machine. Jobs in the partition "high" preempt the others."""
    if not all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS):
        pytest.skip("SLURM is not installed (Debian: slurmctld slurmd slurm-client munge)")
    folder = Path(tempfile.mkdtemp(prefix="attnlab-slurm-"))  # a socket's path must be short
    folder.chmod(0o755)
    host, user = socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name
    (folder / "slurm.conf").write_text(
        f"""
        ClusterName=attnlab
        SlurmctldHost={host}
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge.socket
        SlurmUser={user}
        SlurmdUser={user}
        SlurmctldPort={free_port()}
        SlurmdPort={free_port()}
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.pid
        ProctrackType=proctrack/pgid
        TaskPlugin=task/none
        SelectType=select/cons_tres
        PreemptType=preempt/partition_prio
        PreemptMode=REQUEUE
        KillWait=60
        ReturnToService=2
        MpiDefault=none
        SlurmdParameters=config_overrides
        NodeName={host} CPUs=2 State=UNKNOWN
        FirstJobId={1 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])}
        PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=60
        PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
        """.replace("        ", "")
    )
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    environment = ENVIRONMENT | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    files = [f"--{what}={folder}/munge.{what.partition('-')[0]}" for what in ("socket", "key-file", "pid-file")]
    files += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    commands = (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"])
    daemons = []
    for command in commands:
        with (folder / f"{command[0]}.out").open("w") as output:
            daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        time.sleep(1)
    deadline = time.monotonic() + 60
    while "idle" not in subprocess.run(["sinfo", "-h"], env=environment, capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, (folder / "slurmctld.out").read_text()[-2000:]
        time.sleep(0.5)
    yield environment
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


class Job:
    """A run under SLURM."""

    def __init__(self, environment, folder, *options, fields=FIELDS):
        self.environment, self.workdir, self.output = environment, folder / "run", folder / "output"
        script = [LAUNCH / "slurm.sbatch", *arguments(self.workdir, fields)]
        self.number = self.command("sbatch", "--parsable", f"--output={self.output}", *options, *script)

    def command(self, *words):
        words, options = list(map(str, words)), {"env": self.environment, "cwd": REPOSITORY}
        done = subprocess.run(words, **options, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait(self, state, within=180):
        deadline = time.monotonic() + within
        while f"JobState={state} " not in (now := self.command("scontrol", "show", "job", self.number)):
            assert time.monotonic() < deadline, f"{now}: {self.output.read_text()[-2000:]}"
            time.sleep(0.5)


@pytest.mark.slow
def test_preempted_slurm_job_is_requeued_with_the_same_result(slurm, two, tmp_path):
    job = Job(slurm, tmp_path, "--ntasks=2", fields=LONG)
    wait_for_step(40, job.workdir)
    job.command("sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 3")
    job.wait("PENDING")
    assert re.search(r"stopped: step \d+ is saved", job.output.read_text())
    assert json.loads((job.workdir / "config.json").read_text())["steps"] == LONG["steps"]
    job.command("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # SLURM would otherwise wait two minutes
    job.wait("COMPLETED")
    assert re.search(r"resumed from step \d+", job.output.read_text())
    assert records(job.workdir) == records(two)
