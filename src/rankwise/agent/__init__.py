"""During the job, one process per node: start, watch and stop the ranks, report the first failure. No torch here."""
