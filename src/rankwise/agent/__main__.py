"""`python -m rankwise.agent RUN_DIR`: the process that job.sh starts on each node.

python -m rankwise.agent RUN_DIR               the head, or a member: the plan and the scheduler's variables say which
python -m rankwise.agent RUN_DIR --node 2      a member that its scheduler has started beside the head's launcher
python -m rankwise.agent -                     a member that the head has started; stdin and stdout are their link
"""

import sys

from rankwise.agent import bootstrap
from rankwise.errors import RankwiseError
from rankwise.host import processes, terminal


def main() -> int:
    try:
        return bootstrap.begin(sys.argv[1:])
    except RankwiseError as error:
        print(terminal.message(str(error)), file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if (shortage := processes.shortage(error)) is None:
            raise
        print(terminal.message(f"cannot start or watch the ranks: {error.strerror}: {shortage}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    terminal.open_closed_streams()
    terminal.leave(main())
