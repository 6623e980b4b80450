"""How a run is asked to stop, and how all ranks stop after the same step."""
