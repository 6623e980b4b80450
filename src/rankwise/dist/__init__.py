"""The ranks: which one this process is, how they connect, and how they communicate.

Names are resolved on first use: the launcher imports no torch.
"""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.dist.comm import broadcast as broadcast
    from rankwise.dist.comm import is_local_main as is_local_main
    from rankwise.dist.comm import local_world_size as local_world_size
    from rankwise.dist.world import World as World
    from rankwise.dist.world import discover as discover

_HOME = {
    **dict.fromkeys(("broadcast", "is_local_main", "local_world_size"), "rankwise.dist.comm"),
    **dict.fromkeys(("World", "discover"), "rankwise.dist.world"),
}

__all__ = sorted(_HOME)

__getattr__ = lazy(__name__, _HOME)
