"""The order of the samples, and how each rank gets its own."""

from rankwise.data.batching import LengthBatches
from rankwise.data.loader import Loader
from rankwise.data.order import Blocks, Order

__all__ = ["Blocks", "LengthBatches", "Loader", "Order"]
