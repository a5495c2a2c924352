"""Connecting to a cluster, if there is one. Real clusters, and contradictory variables, are in tests/test_launch.py."""

import jax
import pytest

from attnlab.support.errors import UserError
from attnlab.training import processes

VARIABLES = (processes.ADDRESS, processes.COUNT, processes.NUMBER, *processes.TASKS, "ATTNLAB_DISTRIBUTED")


@pytest.fixture
def environment(monkeypatch):
    """The environment of a machine without a cluster; returns a function that sets variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2", "ATTNLAB_DISTRIBUTED": "0"},
        {"JAX_NUM_PROCESSES": "two", "JAX_COORDINATOR_ADDRESS": "localhost:1", "ATTNLAB_DISTRIBUTED": "0"},
    ],
    ids=str,
)
def test_connect_without_cluster_or_forbidden_does_nothing(environment, values):
    environment(**values)
    processes.connect(timeout=5)
    assert jax.process_count() == 1


def test_connect_with_an_unknown_switch_raises_one_line(environment):
    environment(ATTNLAB_DISTRIBUTED="yes")
    with pytest.raises(UserError, match="ATTNLAB_DISTRIBUTED=yes"):
        processes.connect(timeout=5)
