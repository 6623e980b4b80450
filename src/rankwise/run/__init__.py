"""What a run is on disk: its directory, configuration, plan and lease."""
