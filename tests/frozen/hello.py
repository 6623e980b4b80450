"""A script of the frozen plans: no torch, so its ranks start in a blink."""

import os

print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} says hello")
