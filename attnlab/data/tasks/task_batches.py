"""Batches of a task. The global batch at a step is a pure function of (seed, step)."""

import copy

import jax
import numpy as np

from attnlab.data.batches import Batch
from attnlab.data.tasks.named import Task
from attnlab.data.tasks.task_draws import TEST

_PARTS = {"all": (1, 0), "first": (2, 0), "second": (2, 1)}  # (distance, first) of the part's steps, counted from TEST


class TaskBatches:
    """Fresh sequences of a task at every step.

    Args:
      task: the task.
      context: T.
      batch_size: sequences in the global batch.
      seed: with the step, determines a batch.
      process_index, process_count: this process gets its contiguous share of each global batch.
    """

    def __init__(self, task: Task, *, context, batch_size, seed, process_index=0, process_count=1):
        self._task, self._context, self._batch_size, self._seed = task, context, batch_size, seed
        share = batch_size // process_count
        self._examples = np.arange(process_index * share, (process_index + 1) * share)

    def of_seed(self, seed: int) -> "TaskBatches":
        """Batches of the same task with another seed."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def __len__(self) -> int:
        return TEST  # steps from here on are held out

    def __getitem__(self, step: int) -> Batch:
        """This process's share of the global batch at `step`."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            sizes = {"batch_size": self._batch_size, "length": self._context}
            drawn = self._task.draw(step, seed=self._seed, **sizes)
        tokens, targets = (np.asarray(x)[self._examples] for x in drawn)
        tokens = np.pad(tokens, ((0, 0), (0, 1)))  # tokens of a batch have one column more than targets
        answers, places = self._task.answers_of(self._context), None
        if answers < self._context:
            places = np.argsort(targets < 0, axis=1, kind="stable")[:, :answers].astype(np.int32)
        weight = np.ones(len(tokens), np.float32)
        return Batch(tokens, self._examples.astype(np.int32), weight, targets=targets, places=places)


class HeldOutBatches:
    """A fixed pass over sequences of a task that training never draws, the same for every seed.

    Args:
      task, context, process_index, process_count: as for `TaskBatches`.
      batch_size: sequences in a global batch; extra sequences in the last batch have weight 0.
      windows: number of sequences.
      part: "all", or "first" or "second", which have no sequence in common.
    """

    def __init__(self, task: Task, *, context, batch_size, windows, part="all", process_index=0, process_count=1):
        share = {"process_index": process_index, "process_count": process_count}
        self._batches = TaskBatches(task, context=context, batch_size=batch_size, seed=0, **share)
        self.windows, self._batch_size, self._part = windows, batch_size, part

    def __len__(self) -> int:
        return -(-self.windows // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        """This process's share of global batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        distance, first = _PARTS[self._part]
        batch = self._batches[TEST + distance * index + first]
        example = index * self._batch_size + batch.example
        return batch._replace(example=example, weight=(example < self.windows).astype(np.float32))
