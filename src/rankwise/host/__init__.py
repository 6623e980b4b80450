"""The machine that this process runs on: its processes, networks and terminal."""
