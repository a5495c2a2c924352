"""Synthetic tasks with a known answer.

A batch is a pure function of the step and the seed, and can be traced: a compiled loop draws batches itself, and `vmap`
over seeds draws them for several runs. Studies train on steps below `TEST`. `batch_size` is B and `length` is T.
"""

from attnlab.data.tasks.associations import recall, spread_recall
from attnlab.data.tasks.copying import selective_copies
from attnlab.data.tasks.modular import running_sums
from attnlab.data.tasks.repetition import inductions, repeats
from attnlab.data.tasks.task_draws import TEST

__all__ = ["TEST", "inductions", "recall", "repeats", "running_sums", "selective_copies", "spread_recall"]
