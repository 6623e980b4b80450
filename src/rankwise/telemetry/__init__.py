"""Metrics of a run: meters, where the time goes, writers, the progress line, why a run is slow."""
