"""One rank of a function: `python -m rankwise.functions.worker NAME`, which the agent starts like any module.

An exception of the function ends this process as it would end a script: the record of it shows the user's line.
"""

import contextlib
import os
from pathlib import Path

from rankwise.errors import RunDirError
from rankwise.functions import calls
from rankwise.ipc import pickles
from rankwise.run.directory import ENV_RUN_DIR, RunDir

__tracebackhide__ = True  # agent/exception_record.py removes the frames of this file from tracebacks


def main() -> None:
    run, rank = RunDir(Path(os.environ[ENV_RUN_DIR])), int(os.environ["RANK"])
    place = run.result(rank)
    place.unlink(missing_ok=True)  # from an earlier attempt
    try:
        fn, args, kwargs = calls.load(run.call)
        answer = calls.answer(fn(*args, **kwargs), rank)
    except Exception as error:
        whole = error.__traceback__
        assert whole is not None
        error.__traceback__ = whole.tb_next  # without this frame
        with contextlib.suppress(RunDirError):
            pickles.write(place, calls.answer_error(error))
        error.__traceback__ = whole
        raise
    pickles.write(place, answer)


if __name__ == "__main__":
    main()
