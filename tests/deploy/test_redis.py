"""The redis component on a real server, with the guide's own commands: TLS, a password,
and rights that suffice for what Baton asks.
"""

import asyncio
import contextlib
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from baton.redis_link import asked, open_redis
from tests.deploy.manifests import KUSTOMIZE, ROOT
from tests.redis_servers import REDIS_SERVER
from tests.waits import soon

PASSWORD = "a-password"
_CALLED = re.compile(r"redis\.p?call\(\s*['\"](\w+)['\"]")

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]


def guide() -> str:
    return (ROOT / "docs" / "guides" / "kubernetes.md").read_text()


def make_secrets(folder: Path) -> None:
    """The files of the Secret `redis-server`, for a server on this machine."""
    (certificate,) = re.findall(r"openssl req .*?-out tls\.crt", guide(), re.DOTALL)
    command = certificate.replace("\\\n", " ").replace("redis.baton.svc", "localhost")
    subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    (users,) = re.findall(r'echo "(user default off.*?)"', guide(), re.DOTALL)
    lines = (line.strip() for line in users.replace("$password", PASSWORD).splitlines())
    (folder / "users.acl").write_text("\n".join(lines) + "\n")


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """Where the component's configuration listens, `localhost:port`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    text = (KUSTOMIZE / "components" / "redis" / "redis.conf").read_text()
    text = text.replace("/run/secrets/redis", str(folder)).replace("dir /tmp", f"dir {folder}")
    (folder / "redis.conf").write_text(text.replace("tls-port 6379", f"tls-port {port}"))
    assert REDIS_SERVER is not None
    process = await asyncio.create_subprocess_exec(
        REDIS_SERVER, str(folder / "redis.conf"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            while b"Ready to accept connections" not in (line := await process.stdout.readline()):
                assert line, "redis-server has ended"
        yield f"localhost:{port}"
    finally:
        process.kill()
        await soon(process.wait())


async def test_baton_is_let_in_with_its_url_and_nobody_else_is(tmp_path):
    make_secrets(tmp_path)
    async with served(tmp_path) as address:
        trust = f"?ssl_ca_certs={tmp_path}/ca.crt"
        client = open_redis(f"rediss://baton:{PASSWORD}@{address}{trust}", 5.0)
        assert await asked(client.ping())
        await client.aclose()
        for url in (
            f"rediss://{address}{trust}",
            f"rediss://baton:wrong@{address}{trust}",
            f"rediss://baton:{PASSWORD}@{address}",
            f"redis://baton:{PASSWORD}@{address}",
        ):
            refused = redis.asyncio.Redis.from_url(url, socket_timeout=5.0)
            with pytest.raises(redis.exceptions.RedisError):
                await refused.ping()
            await refused.aclose()


async def test_its_rights_suffice_for_every_script_and_for_nothing_that_manages_the_server(
    tmp_path,
):
    make_secrets(tmp_path)
    # Who is asked whether a command is allowed has to be somebody who may ask.
    with (tmp_path / "users.acl").open("a") as file:
        file.write("user asker on >asker ~* &* +@all\n")
    packages = ("router", "kvpool", "baton")
    scripts = [file for name in packages for file in (ROOT / name).rglob("*.lua")]
    called = {command.upper() for file in scripts for command in _CALLED.findall(file.read_text())}
    assert len(called) > 10
    async with served(tmp_path) as address:
        url = f"rediss://asker:asker@{address}?ssl_ca_certs={tmp_path}/ca.crt"
        client = redis.asyncio.Redis.from_url(url)

        async def may(*command: str) -> bool:
            said: bytes = await client.execute_command("ACL DRYRUN", "baton", *command)
            return said == b"OK"

        for command in sorted(called):
            arity = (await client.execute_command("COMMAND", "INFO", command))[command.lower()][
                "arity"
            ]
            assert await may(command, *("1" for _ in range(abs(arity) - 1))), command
        assert await may("EVALSHA", "0" * 40, "1", "key")
        assert await may("SCRIPT", "LOAD", "return 1")
        for command in (("CONFIG", "GET", "*"), ("FLUSHALL",), ("SHUTDOWN",), ("ACL", "LIST")):
            assert not await may(*command), command
        await client.aclose()
