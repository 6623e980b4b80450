"""Whether a training is the same on any number of ranks: shown on the user's own model, data and loop.

    rankwise selftest train.py [its arguments]        script.py: on 1, 2 and 4 ranks
    rankwise.selftest(trainer)                        trainer.py: on the ranks that there are

A script with a Trainer is asked directly; any other is watched while it takes its first steps (instrument.py), and what its
ranks have done is compared afterwards (compare.py). What is found is a list of Findings (finding.py).
"""
