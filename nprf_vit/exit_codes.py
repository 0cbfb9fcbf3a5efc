"""The exit codes by which scripts know how a command ended (docs/reliability.md)."""

import enum


class Exit(enum.IntEnum):
    """All exit codes of the commands; those from 64 on are named after sysexits.h."""

    DONE = 0
    FAILED = 1  # the run cannot go on, or a crash
    INPUT = 2  # a mistake in what was given; argparse's code too
    STALLED = 70  # EX_SOFTWARE: a rank shows no sign of life
    NOT_SAVED = 74  # EX_IOERR: the work was done, and what it was done for could not be written
    PREEMPTED = 75  # EX_TEMPFAIL: nothing is wrong, start the same command again
