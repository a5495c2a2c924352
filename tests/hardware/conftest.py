"""Programs compiled for absent TPUs and GPUs, by their own compilers. No program runs."""

import functools

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from attnlab.planning import programs, topologies
from attnlab.support.errors import UserError
from attnlab.training import parallel, run
from attnlab.training.program import TrainProgram


def pytest_collection_modifyitems(items):
    for item in items:
        if "hardware" in item.path.parts:
            item.add_marker(pytest.mark.hardware)


@pytest.fixture(scope="session", autouse=True)
def no_cache():
    """Disable JAX's persistent cache, because programs for absent devices cannot be read back from it."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def topology():
    """`topology(name)`: the devices to compile for; skips, with the reason, if their compiler is not installed."""

    @functools.cache
    def find(name):
        try:
            return topologies.find(name)
        except UserError as error:
            if " needs " in str(error) or "does not describe" in str(error):
                pytest.skip(str(error))
            raise

    return find


@pytest.fixture(scope="session")
def compiled():
    """`compiled(function, *shapes)`: (HLO text, `Program`) for the mesh of the shapes."""

    def compile_for(function, *shapes):
        mesh = jax.tree.leaves(shapes)[0].sharding.mesh
        platform = {"gpu": "cuda"}.get(mesh.devices.flat[0].platform, mesh.devices.flat[0].platform)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it which TPU to compile for
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
        program = lowered.compile()
        return program.as_text(), programs.read(program)

    return compile_for


@pytest.fixture(scope="session")
def training_step(topology):
    """`training_step(config, topology, vocab_size)`: (HLO text, `Program`) of a run's training step."""

    def compile_for(config, name, vocab_size=128):
        devices = topology(name).devices
        config = run.resolve(config, device=devices[0]).config
        experiment = TrainProgram(config, vocab_size, parallel=parallel.from_config(config, devices=devices))
        with jax.sharding.use_abstract_mesh(experiment.parallel.mesh.abstract_mesh):
            program = experiment.lower().compile()
        return program.as_text(), programs.read(program)

    return compile_for
