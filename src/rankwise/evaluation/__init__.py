"""Evaluation and prediction: exact metrics, and predictions in the order of the dataset, on any number of ranks."""

from rankwise.evaluation.evaluate import Evaluate, Pair
from rankwise.evaluation.metrics import Metrics
from rankwise.evaluation.predictions import predict

__all__ = ["Evaluate", "Metrics", "Pair", "predict"]
