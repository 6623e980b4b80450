"""Functions in the place of scripts: `run_function` by our own launcher, `on_submitit` by Submitit's executors."""
