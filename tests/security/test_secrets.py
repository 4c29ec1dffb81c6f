"""Keys and tokens stand in no log, no metric, no audit record and no reply; prompts in none of the first three."""

import logging
from pathlib import Path
from typing import Any

import pytest

from baton.config.schema import AdminConfig, BatonConfig, LogConfig, RouterConfig, TenantsConfig
from baton.errors import ConfigError, WorkerLostError
from baton.redis_link import open_redis
from baton.telemetry.metrics import new_registry
from router.http.audit import AuditLog
from router.tenancy import open_tenancy
from tests.redis_servers import no_refusals
from tests.router.http.test_account import parts
from tests.router.served import serve

KEY = "k"
WRONG = "wrong-but-secret-credential"
PRIVATE = "a most private question"


async def test_neither_keys_nor_prompts_are_written_anywhere(tmp_path: Path, caplog: Any):
    caplog.set_level(logging.DEBUG)
    log = AuditLog(tmp_path / "audit.log", new_registry())
    async with serve(parts=parts("weight: 1") | {"audit": log}) as served:
        replies = [
            await served.chat({"Authorization": f"Bearer {WRONG}"}),
            await served.chat({"x-api-key": WRONG}),
            await served.chat({"Authorization": f"Basic {WRONG}"}),
            await served.chat({"Authorization": f"Bearer {KEY}"}, cache_salt=PRIVATE),
        ]
        message = {"role": "user", "content": PRIVATE}
        served.generator.fault = WorkerLostError("lost")
        replies.append(await served.chat({"Authorization": f"Bearer {KEY}"}, messages=[message]))
        metrics = (await served.http.get("/metrics")).text
    log.close()
    assert [reply.status_code for reply in replies] == [401, 401, 401, 200, 503]
    written = caplog.text + metrics + (tmp_path / "audit.log").read_text()
    for secret in (WRONG, PRIVATE, f"Bearer {KEY}"):
        assert secret not in written
        assert not any(secret in reply.text for reply in replies)


async def test_a_tenants_name_is_no_label_unless_the_operator_wants_it():
    async with serve(parts=parts("requests_per_minute: 1, request_burst: 1")) as served:
        for _ in range(2):
            await served.chat({"Authorization": f"Bearer {KEY}"})
        metrics = (await served.http.get("/metrics")).text
        assert "acme" not in metrics
        assert 'tenant_class="interactive"' in metrics


@pytest.mark.parametrize("url", ["http://u:hunter2@h", "hunter2", "redis://u:hunter2@h:notaport"])
def test_a_wrong_url_of_redis_is_not_repeated(url: str):
    with pytest.raises(ConfigError) as refused:
        open_redis(url, 1.0)
    assert "hunter2" not in str(refused.value)


async def test_a_tenants_document_that_cannot_be_read_lets_nobody_in(tmp_path: Path):
    config = BatonConfig(
        router=RouterConfig(api_keys=()),
        tenants=TenantsConfig(file=str(tmp_path / "missing.yaml")),
        admin=AdminConfig(),
        log=LogConfig(),
    )
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        async with open_tenancy(config, new_registry(), no_refusals()):
            pass
