"""Before the job: make the plan, give it to a scheduler, follow it. No torch here: a login node needs none."""
