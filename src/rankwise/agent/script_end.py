"""What the interpreter does for the files of a script at its end. A rank ends with `_exit`, so it does this itself.

    status = script_end.finish()      # after threads and exit functions; the caller then calls os._exit

fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library.
"""

import contextlib
import gc
import io
import sys
import threading
import types

_KEPT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, int, float, complex, str, bytes)


def finish():
    """Returns 120 if output is lost, 0 otherwise. If a signal handler of the script raises here, only one step is cut short."""
    status = flush_streams()
    for step in (drop_variables, complete_files):
        with contextlib.suppress(BaseException):
            step()
    return status or flush_streams()  # again: destructors may print


def drop_variables():
    """Drop the objects that are variables of `__main__`: destructors complete files, and remove temporary ones.

    The last one first, because its destructor may use those before it; functions, classes and modules stay for the same reason.
    Objects of torch stay: no file waits for them, tearing them down takes seconds, and the destructor of a gloo group can hang.
    """
    # The interpreter would have stopped the script's daemon threads by now. Here they run, and may miss what is dropped.
    threading.excepthook = lambda *_: None
    variables = vars(sys.modules["__main__"])
    for name in reversed(list(variables)):
        kind = type(variables.get(name))
        if not (name.startswith("__") or issubclass(kind, _KEPT) or _is_torchs(kind)):
            variables[name] = None


def _is_torchs(kind):
    return any(str(base.__module__).partition(".")[0] == "torch" for base in kind.__mro__)


def flush_streams():
    """Returns 120 if output is lost, 0 otherwise, as Python itself reports it."""
    status = 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except (OSError, ValueError, AttributeError):
            status = 120
    return status


def complete_files():
    """Flush all files, wherever the script keeps them, and close those whose last bytes only `close` writes."""
    compressed = _classes(("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"))
    archives = _classes(("zipfile", "ZipFile"))
    # A file writes into the buffers of those that come later.
    order = ((io.TextIOBase, "flush"), (compressed, "close"), (archives, "close"), (io.IOBase, "flush"))
    files = _objects(io.IOBase, *archives)
    for kind, act in order:
        for file in (f for f in files if issubclass(type(f), kind)):
            with contextlib.suppress(Exception):
                if kind is archives or (not file.closed and file.writable()):
                    getattr(file, act)()
    h5py = sys.modules.get("h5py")
    for file in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE) if h5py is not None else ():
        with contextlib.suppress(Exception):
            h5py.File(file).close()


def _classes(*names):
    """Those of these classes (module, name) whose module is imported."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _objects(*classes):
    """type(f), not isinstance(f): asking some objects for their class runs their code. By id: a class need not have a hash."""
    found = gc.get_objects()
    kinds = {id(kind) for kind in {id(type(f)): type(f) for f in found}.values() if issubclass(kind, classes)}
    return [f for f in found if id(type(f)) in kinds]
