"""Two nodes on this machine with a cable between them that can be cut: network namespaces and a veth pair."""

import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from .agents import Agents

ADDRESSES = '10.77.31.1', '10.77.31.2'


def _ip(*args: str) -> None:
    done = subprocess.run(['ip', *args], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f'ip {" ".join(args)}: {done.stderr.strip()}')


class Nodes:
    """Namespaces with one interface each, named `cable` in both."""

    def __init__(self, retries: int | None = None) -> None:
        """`retries` is the kernel's tcp_retries2: how often it repeats what is not answered; None for its default."""
        self.retries = retries
        tag = uuid.uuid4().hex[:6]
        self.names = [f'nprf{tag}{i}' for i in range(2)]
        self.tag = tag

    def __enter__(self) -> 'Nodes':
        if shutil.which('ip') is None:
            pytest.skip('needs the command ip (Debian: iproute2)')
        try:
            self._make()
        except OSError as error:
            self.__exit__()
            pytest.skip(f'network namespaces cannot be made here: {error}')
        return self

    def _make(self) -> None:
        ends = [f'v{self.tag}{i}' for i in range(2)]
        for name in self.names:
            _ip('netns', 'add', name)
        _ip('link', 'add', ends[0], 'type', 'veth', 'peer', 'name', ends[1])
        for name, end, address in zip(self.names, ends, ADDRESSES):
            _ip('link', 'set', end, 'netns', name, 'name', 'cable')
            for args in (
                ('addr', 'add', f'{address}/24', 'dev', 'cable'),
                ('link', 'set', 'cable', 'up'),
                ('link', 'set', 'lo', 'up'),
            ):
                _ip('-n', name, *args)
            if self.retries is not None:
                setting = f'echo {self.retries} > /proc/sys/net/ipv4/tcp_retries2'
                subprocess.run(['ip', 'netns', 'exec', name, 'sh', '-c', setting], check=True)

    def cut(self) -> None:
        """Every packet is lost from now on, while the interfaces stay up, as with a dead switch."""
        for name, other in zip(self.names, reversed(ADDRESSES)):  # frames to a card that is not there
            _ip(
                '-n', name, 'neigh', 'replace', other, 'lladdr', '02:00:00:00:00:99', 'dev', 'cable', 'nud', 'permanent'
            )

    def mend(self) -> None:
        for name, other in zip(self.names, reversed(ADDRESSES)):
            _ip('-n', name, 'neigh', 'del', other, 'dev', 'cable')

    def unplug(self) -> None:
        """Take the interface of the second node down."""
        _ip('-n', self.names[1], 'link', 'set', 'cable', 'down')

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            subprocess.run(['ip', 'netns', 'del', name], capture_output=True)


class NodeAgents(Agents):
    """One torchrun agent per node; the store is on the first."""

    def __init__(self, nodes: Nodes, folder: Path, script: str, *args, conf: str = '', restarts: int = 0):
        super().__init__(folder, script, *args, restarts=restarts)
        self.nodes, port = nodes, 29500
        where = self.command.index('--rdzv-endpoint')
        self.command[where + 1] = f'{ADDRESSES[0]}:{port}'
        where = self.command.index('--rdzv-conf')
        self.command[where + 1] += f',{conf}' * bool(conf)

    def start(self, **environment: str) -> subprocess.Popen:
        number, plain = len(self.processes), self.command
        self.command = [*plain]
        self.command[plain.index('--local-addr') + 1] = ADDRESSES[number]
        self.command[plain.index('--rdzv-conf') + 1] += f',is_host={int(number == 0)}'  # both have one host name
        self.command = ['ip', 'netns', 'exec', self.nodes.names[number], *self.command]
        try:
            return super().start(GLOO_SOCKET_IFNAME='cable', **environment)
        finally:
            self.command = plain
