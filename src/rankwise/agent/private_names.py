"""The private names of torch and of the standard library that ranks use before and after their script, each with what happens
without it.

    for group in private_names.groups(c10d): ...

The files of this folder that fork_server.py loads use no others; dist/private_names.py has those of the library. Any release
may drop such a name: then one feature is off, and rank 0 reports it once. This file imports only the standard library.
"""

import atexit
import contextlib
import functools
import os
import runpy
import sys
import threading

NAMES = {
    "_run_module_as_main": "the variables of a module that was started with -m are cleared before its exit functions run",
    "_shutdown": "the exit of each rank takes longer",
    "_run_exitfuncs": "the exit of each rank takes longer",
    "_world": "process groups other than the default one are neither counted nor kept until a rank exits",
    "_new_process_group_helper": "collectives are not counted as progress",
    "_device_types": "collectives are not counted as progress",
    "_get_backend": "collectives are not counted as progress",
    "_get_sequence_number_for_group": "collectives are not counted as progress",
    "_broadcast_coalesced": "--check-collectives does not see DDP's broadcast of its buffers",
}
"""For each name, what rank 0 prints if a release lacks it."""

_said = set()


def _find(owner, name):
    """The value of a private name of this owner, None if it is missing. This file reads private names only through here."""
    found = getattr(owner, name, None)
    if found is None and name not in _said:
        _said.add(name)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # the disk of the log may be full
                print(f"rankwise: warning: torch or Python has no {name}: {NAMES[name]}", file=sys.stderr)
    return found


# --- a rank's script, and its end


def run_module(name):
    """Run a module as `python -m name` does. Public alternative: runpy.run_module, which clears the module's namespace after
    the run."""
    run = _find(runpy, "_run_module_as_main")
    if run is not None:
        run(name)
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def end_python():
    """Wait for threads and call exit functions, as the interpreter does at its end. False if the interpreter must do this
    itself."""
    wait, call = _find(threading, "_shutdown"), _find(atexit, "_run_exitfuncs")
    if wait is None or call is None:
        return False
    wait()
    call()
    return True


# --- torch.distributed


def groups(c10d):
    """All process groups. Public alternative: only the default one."""
    world = _find(c10d, "_world")
    if world is not None:
        return list(world.pg_map)
    return [c10d.group.WORLD] if c10d.is_initialized() else []


def before_each_group(c10d, call):
    """From now on, `call()` before each process group is made: all functions that make one use this private one."""
    make = _find(c10d, "_new_process_group_helper")
    if make is None:
        return

    @functools.wraps(make)
    def new_process_group_helper(*args, **kwargs):
        call()
        return make(*args, **kwargs)

    c10d._new_process_group_helper = new_process_group_helper


def begun(group):
    """The number of collectives, sends and receives of this rank in a group, from Python or C++; what is not known counts 0."""
    return sum(number or 0 for number in _numbers(group))


def counts(group):
    """Whether the number of a group's collectives is known."""
    numbers = _numbers(group)
    return bool(numbers) and None not in numbers


def _numbers(group):
    """How many collectives each backend of a group has begun; None for one that does not number them."""
    devices, backend_of = _find(group, "_device_types"), _find(group, "_get_backend")
    numbers = []
    backends = [backend_of(device) for device in devices] if devices is not None and backend_of is not None else []
    for backend in {id(one): one for one in backends}.values():  # one for several types of device
        number = None
        with contextlib.suppress(RuntimeError):
            last = _find(backend, "_get_sequence_number_for_group")
            number = last() if last is not None else None
        numbers.append(number)
    return numbers


def before_each_broadcast(dist, call):
    """From now on, `call(group, tensors)` before DDP broadcasts its buffers."""
    broadcast = _find(dist, "_broadcast_coalesced")
    if broadcast is None:
        return

    @functools.wraps(broadcast)
    def broadcast_coalesced(group, tensors, *args, **kwargs):
        call(group, tensors)
        return broadcast(group, tensors, *args, **kwargs)

    dist._broadcast_coalesced = broadcast_coalesced
