"""Test any implementation of attention against its specification.

    report = check_attention(my_attention)

This compares a function with the formula in NumPy float64, feature by feature, and reports whether each feature is
right, wrong (with the smallest failing call as code), silently ignored, refused, or silently slow.
"""

from attnlab.ops.call import AttentionCall
from attnlab.testing.cases import FEATURES, SHAPES, Case, Feature, Shape, calls, draw
from attnlab.testing.check import check_attention, results
from attnlab.testing.layer import check_layer
from attnlab.testing.recurrence import (
    RECURRENCE_FEATURES,
    RecurrenceFeature,
    RecurrenceShape,
    check_recurrence,
    recurrence_answer,
    recurrence_call,
)
from attnlab.testing.reference import Answer
from attnlab.testing.reference import attention as answer
from attnlab.testing.report import PROFILES, Report, Row
from attnlab.testing.subject import Unsupported, as_attnlab

__all__ = [
    "FEATURES",
    "PROFILES",
    "RECURRENCE_FEATURES",
    "SHAPES",
    "Answer",
    "AttentionCall",
    "Case",
    "Feature",
    "RecurrenceFeature",
    "RecurrenceShape",
    "Report",
    "Row",
    "Shape",
    "Unsupported",
    "answer",
    "as_attnlab",
    "calls",
    "check_attention",
    "check_layer",
    "check_recurrence",
    "draw",
    "recurrence_answer",
    "recurrence_call",
    "results",
]
