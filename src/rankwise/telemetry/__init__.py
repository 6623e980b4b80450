"""Metrics of a run: meters, where the time goes, writers, the progress line."""

from rankwise.telemetry.breakdown import TimeBreakdown
from rankwise.telemetry.meters import Meters
from rankwise.telemetry.progress import Progress
from rankwise.telemetry.slowness import SlowWatch, Spent
from rankwise.telemetry.writers import JsonLines, TensorBoard

__all__ = ["JsonLines", "Meters", "Progress", "SlowWatch", "Spent", "TensorBoard", "TimeBreakdown"]
