"""Tests of the forecaster and the archive. Run with `python -m unittest discover -s tests`."""

import unittest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tidecast import gauges, training
from tidecast.archive import Archive
from tidecast.model import OVERLAP, Forecaster, forecast

LEVELS = gauges.levels(seed=0, stations=16, hours=400)


class TestForecaster(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = Forecaster()
        cls.params, cls.losses = training.train(cls.model, LEVELS, steps=60)

    def test_training_lowers_the_loss(self):
        self.assertLess(np.mean(self.losses[-5:]), np.mean(self.losses[:5]) / 2)

    def test_decoding_with_cache_equals_the_full_pass(self):
        history, lengths, levels = training.batch(LEVELS, seed=1, longest=60, hours=12)
        whole = self.model.apply(self.params, history, lengths, levels)
        memory = self.model.apply(self.params, history, lengths, method="encode")
        cache = self.model.init_cache(*levels.shape)
        decode = jax.jit(partial(self.model.apply, method="decode"))
        rows, prefilled = [], levels[:, :OVERLAP]
        for part in (prefilled, *np.split(levels[:, OVERLAP:], levels.shape[1] - OVERLAP, axis=1)):
            row, cache = decode(self.params, part, memory, lengths, cache)
            rows.append(row)
        self.assertEqual(cache.length.tolist(), [levels.shape[1]] * len(levels))
        np.testing.assert_allclose(jnp.concatenate(rows, axis=1), whole, atol=1e-5)

    def test_forecast_ignores_padding_of_each_history(self):
        history, lengths, _ = training.batch(LEVELS, seed=2, longest=60, hours=12)
        predicted = forecast(self.model, self.params, history, lengths, hours=12)
        self.assertEqual(predicted.shape, (16, 12))
        history = np.where(np.arange(60) < lengths[:, None], history, np.nan)
        np.testing.assert_array_equal(forecast(self.model, self.params, history, lengths, hours=12), predicted)
        shorter = lengths[0]
        alone = forecast(self.model, self.params, history[:1, :shorter], lengths[:1], hours=12)
        np.testing.assert_allclose(alone[0], predicted[0], atol=1e-4)


class TestArchive(unittest.TestCase):
    def test_forecast_in_shards_equals_the_whole(self):
        archive, times = Archive(jnp.asarray(LEVELS[0])), jnp.array([100, 250, 388])
        days = jnp.asarray(LEVELS[0][times[:, None] + np.arange(-25, 0)])
        whole, parts = (archive.forecast(days, times, jnp.float32(0.001), shards=shards) for shards in (1, 5))
        np.testing.assert_allclose(parts, whole, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
