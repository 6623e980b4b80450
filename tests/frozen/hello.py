"""A script of the frozen plans. It does not import torch, so its ranks start at once."""

import os

print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} says hello")
