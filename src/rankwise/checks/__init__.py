"""The self-test: is a training the same on any number of ranks? Tested with the user's own model, data and loop.

    rankwise selftest train.py [its arguments]        script.py: on 1, 2 and 4 ranks
    rankwise.selftest(trainer)                        trainer.py: on the current ranks

If the script has a Trainer, rankwise tests the Trainer directly. It watches any other script during its first steps
(instrument.py), and compares its ranks afterwards (compare.py). The result is a list of Findings (finding.py).
"""
