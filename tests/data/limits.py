"""A process with little memory, for files that would take much of it or bring the process down."""

import os
import resource
import traceback
from collections.abc import Callable


def run_limited(work: Callable[[], str], megabytes: int) -> str:
    """What `work` returns in a forked process, which may use so much memory beyond that of this one."""
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open('/proc/self/statm') as stream:
                pages = int(stream.read().split()[0])
            limit = pages * resource.getpagesize() + (megabytes << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with open(target, 'w') as stream:
                stream.write(work())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(target)
    with open(source) as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f'the process ended with {code}'
    return said
