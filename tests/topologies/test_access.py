"""Clusters and Sentinels over TLS, as ACL users with no more rights than docs/guides/secure.md names."""

import asyncio
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from tests.support.access import QUEUE_USER, USER, make_users, more_rights
from tests.support.tls import terminated
from tests.support.topologies import PASSWORD, QUOTED, Server, cluster, sentinels, within
from tests.topologies.service import service
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.store import RedisStore, connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EPISODES = 2


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[Callable[..., int], str]]:
    """What puts TLS before a port, and the options of a URL that trust its certificate."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ExitStack() as stack:

        def before(port: int, *, plain: bool = False) -> int:
            return stack.enter_context(terminated(context, port, plain=plain))

        yield before, f"ssl_check_hostname=true&ssl_ca_certs={tmp_path}/ca.pem"


def refused(servers: Sequence[Server]) -> list[Any]:
    """What the servers did not allow, so far."""
    found = []
    for server in servers:
        with server.admin as admin:
            found += admin.execute_command("ACL", "LOG")
            admin.execute_command("ACL", "LOG", "RESET")
    return found


async def test_a_cluster(tls: tuple[Callable[..., int], str], tokenizer_dir: Path, tmp_path: Path) -> None:
    """The service needs no other right on a cluster, nor where a slot is just moving."""
    before, options = tls
    with (
        cluster(tmp_path / "cluster", announced=before) as nodes,
        EmbeddedValkey() as queue,
    ):
        [rights] = more_rights("cluster")
        for node in nodes.nodes:
            with node.admin as admin:
                make_users(admin, PASSWORD, *rights)
        with redis.Redis.from_url(queue.url) as admin:
            make_users(admin, PASSWORD)
        queue_url = f"redis://{QUEUE_USER}:{QUOTED}@127.0.0.1:{queue.port}/0"
        url = f"{nodes.url(USER, scheme='rediss+cluster')}?{options}"
        with service(tmp_path, tokenizer_dir, url, queue_url) as running:
            async with running.load(EPISODES) as report:
                await asyncio.sleep(1)
                source, target = nodes.nodes[:2]
                for slot in nodes.used(source)[:5]:
                    nodes.begin_move(slot, source, target)
                    await asyncio.sleep(0.2)
                    nodes.move_keys(slot, source, target)
                    await asyncio.sleep(0.2)
                    nodes.end_move(slot, target)
            for process in running.fleet.started:
                assert PASSWORD not in process.output()
                assert QUOTED not in process.output()
        assert report.problems == []
        assert report.collects > 0
        assert refused(nodes.nodes) == []
        with redis.Redis.from_url(queue.url) as admin:
            assert admin.execute_command("ACL", "LOG") == []


async def test_sentinels(tls: tuple[Callable[..., int], str], tokenizer_dir: Path, tmp_path: Path) -> None:
    """The service needs no other right behind Sentinels, nor to wait for replicas, nor after a failover."""
    before, options = tls
    with sentinels(tmp_path / "servers", announced=lambda port: before(port, plain=True)) as made:
        [more, of_sentinels] = more_rights("Sentinels")
        [waiting] = more_rights("--redis-wait-replicas")
        for server in made.servers:
            with server.admin as admin:
                make_users(admin, PASSWORD, *more, *waiting)
        for sentinel in made.sentinels:
            with sentinel.admin as admin:
                for user in (USER, QUEUE_USER):
                    admin.execute_command("ACL", "SETUSER", user, "on", f">{PASSWORD}", *of_sentinels)
        ports = [before(sentinel.port) for sentinel in made.sentinels]
        url, queue_url = (
            f"{made.url(user, 'rediss+sentinel', ports)}&{options}" for user in (USER, QUEUE_USER)
        )
        with service(tmp_path, tokenizer_dir, url, queue_url, "--redis-wait-replicas", "1") as running:
            async with running.load(EPISODES) as report:
                await asyncio.sleep(1)
                dead = made.primary
                assert refused([dead]) == []
                dead.kill()
                await asyncio.to_thread(within, 20, lambda: made.primary is not dead)
                await asyncio.sleep(2)
        assert report.problems == []
        assert report.collects > 0
        assert refused([*(one for one in made.servers if one is not dead), *made.sentinels]) == []


async def test_a_stranger_is_not_trusted(
    tls: tuple[Callable[..., int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, and Sentinels, whose certificate another authority signed are not talked to."""
    monkeypatch.setattr("tokentape_contracts.limits.STORE_RETRY_S", 0.3)
    before, options = tls
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    with EmbeddedValkey() as server:
        port = before(server.port)
        for form in (f"cluster://127.0.0.1:{port}", f"sentinel://127.0.0.1:{port}/main"):
            client = connect(f"rediss+{form}?{options.replace('ca.pem', 'other.pem')}")
            with pytest.raises(Exception, match=r"certificate verify failed|No master found"):
                await RedisStore(client).tail("a")
            await client.aclose()
