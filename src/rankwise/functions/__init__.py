"""Functions in the place of scripts by our own launcher."""
