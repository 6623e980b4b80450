"""During the job, one process a node: start, watch and stop the ranks, name the first failure. No torch here."""
