import ignite.distributed as idist
from answer import say


def train(_):
    say(idist.get_rank(), idist.get_local_rank(), idist.get_node_rank(), idist.get_world_size())


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
