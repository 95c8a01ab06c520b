"""The process that replays a log beside a gateway: one job from stdin, one result to stdout.

If its stdin closes, the process ends at once, because the gateway has ended or no longer needs the
result.
"""

from __future__ import annotations

import os
import sys
from threading import Thread

from planner.auto.cpu_budget import CpuBudget, set_limits


def main() -> None:
    """Run the job on stdin, and print its result.

    The exit status is 1 if the job cannot be read.
    """
    set_limits()
    # This import takes most of a second of CPU time, to which the limits must apply.
    from planner.auto.run_job import read_job, run_job

    pipe = sys.stdin.buffer
    job = read_job(pipe)
    if job is None:
        sys.exit(1)
    Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()
    answer = run_job(job, CpuBudget(job.cpu_share).pause)
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # not by the buffered reader, whose lock would block the end of the process
    os._exit(0)


if __name__ == "__main__":
    main()
