"""Several torchrun agents on this machine, as on several nodes: they meet on the loopback interface."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.engine.running import ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class Agents:
    """Starts agents that run a script with its arguments; their output goes to files in `folder`."""

    def __init__(self, folder: Path, script: str, *args, nodes: int | str = 2, processes: int = 1, restarts: int = 3):
        port = self.port = free_port()
        self.command = [sys.executable, '-m', 'torch.distributed.run', '--nnodes', str(nodes)]
        self.command += ['--nproc-per-node', str(processes), '--max-restarts', str(restarts), '--rdzv-backend', 'c10d']
        self.command += ['--rdzv-endpoint', f'127.0.0.1:{port}', '--rdzv-id', f'run{port}', '--local-addr', '127.0.0.1']
        self.command += ['--rdzv-conf', 'last_call_timeout=2', '--monitor-interval', '0.2', str(ROOT / script)]
        self.command += [str(arg) for arg in args]
        self.folder, self.processes = folder, []

    def start(self, **environment: str) -> subprocess.Popen:
        """One more node; its workers die with it."""
        log = self.folder / f'agent{len(self.processes)}.log'
        env = {**os.environ, 'PYTHONPATH': str(ROOT), **environment}
        with open(log, 'wb') as stream:
            agent = subprocess.Popen(self.command, stdout=stream, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        self.processes.append(agent)
        return agent

    def has_store(self) -> bool:
        """Whether some agent serves the store: the first that binds the port does."""
        with socket.socket() as probe:
            return probe.connect_ex(('127.0.0.1', self.port)) == 0

    def wait(self, seconds: int = 300) -> list[int]:
        return [agent.wait(timeout=seconds) for agent in self.processes]

    def output_text(self) -> str:
        logs = sorted(self.folder.glob('agent*.log'))
        return '\n'.join(f'--- {log.name}\n{log.read_text(encoding="utf-8", errors="replace")}' for log in logs)

    def __enter__(self) -> 'Agents':
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self.processes:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
