"""`python -m rankwise.agent RUN_DIR`: what job.sh becomes on a node."""

import sys
from pathlib import Path

from rankwise import processes
from rankwise.agent.agent import Agent
from rankwise.errors import RankwiseError
from rankwise.plan import Plan
from rankwise.rundir import RunDir


def main() -> int:
    try:
        run = RunDir(Path(sys.argv[1]))
        return Agent(Plan.load(run.plan), run).run()
    except RankwiseError as error:
        print(f"rankwise: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if (shortage := processes.shortage(error)) is None:
            raise
        print(f"rankwise: cannot start or watch the ranks: {error.strerror}: {shortage}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
