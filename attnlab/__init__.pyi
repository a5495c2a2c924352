# The public names: type checkers read them here, and `__init__.py` does.
from attnlab import comparing as comparing
from attnlab import interop as interop
from attnlab import masks as masks
from attnlab import nn as nn
from attnlab import score_mods as score_mods
from attnlab import see as see
from attnlab import testing as testing
from attnlab.generation.scoring import score as score
from attnlab.loading import load as load
from attnlab.ops.attention import attention as attention
from attnlab.ops.attention import attention_weights as attention_weights
from attnlab.ops.attention import explain as explain
from attnlab.ops.attention import implementations as implementations
from attnlab.ops.attention import merge as merge
from attnlab.ops.context import context_parallel as context_parallel
from attnlab.ops.linear import LinearState as LinearState
from attnlab.ops.linear import linear_attention as linear_attention
from attnlab.ops.recurrence import linear_recurrence as linear_recurrence
from attnlab.ops.stick_breaking import stick_breaking_attention as stick_breaking_attention
from attnlab.ops.stick_breaking import stick_breaking_weights as stick_breaking_weights
from attnlab.records import metrics as metrics

__version__: str
