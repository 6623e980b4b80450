"""What a Loader accepts."""

from __future__ import annotations

from rankwise.data.batching import LengthBatches
from rankwise.host.arguments import Argument

BATCHES = Argument(
    lambda value: isinstance(value, LengthBatches) or (hasattr(value, "__iter__") and not isinstance(value, str)),
    "LengthBatches(...), or a batch sampler that yields lists of indices, each a global batch",
)
STATE = Argument(
    lambda value: isinstance(value, dict) and {"samples", "seed", "shuffle", "ranks", "epoch", "position"} <= value.keys(),
    "what state_dict() of a Loader returned",
)
MOVED = {
    "world": "leave it out; the Loader calls rankwise.init() at its first use",
    "batch_tokens": "it is now batches=LengthBatches(tokens=...)",
    "global_batch_tokens": "it is now batches=LengthBatches(global_tokens=...)",
    "lengths": "it is now batches=LengthBatches(tokens=..., lengths=...), or an attribute `lengths` of the dataset",
    "pool": "it is now batches=LengthBatches(tokens=..., pool=...)",
    "batch_sampler": "it is now batches=...; each batch of the sampler is a global batch",
    "sampler": "give batches=torch.utils.data.BatchSampler(sampler, batch_size, drop_last); each batch is a global batch",
    "generator": "the order follows from seed=..., on any number of ranks",
    "multiprocessing_context": "leave it out; torch.multiprocessing.set_start_method sets how workers start",
    "pin_memory_device": "leave it out; memory is pinned for the rank's own device",
    "in_order": "leave it out; batches always come in order",
}
