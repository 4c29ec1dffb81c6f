import dns.rcode
import pytest

from baton.errors import ConfigError
from router.discovery.dns import DnsDiscovery
from tests.dns_server import DnsServer, dns_server

pytestmark = pytest.mark.timeout(30)

NAME = "decode.test.:7001"
SERVICE = "_grpc._tcp.decode.test."


@pytest.fixture
def server():
    with dns_server() as server:
        yield server


def discovery(server: DnsServer, *names: str, pools: tuple[str, ...] = ()) -> DnsDiscovery:
    return DnsDiscovery(names, pools, servers=[server.address])


async def found(discovery: DnsDiscovery) -> set[str]:
    look = await discovery.look()
    assert look.faults == ()
    return {one.address for one in look.workers}


async def test_every_address_of_a_name_is_a_worker(server):
    server.records = {"decode.test.": {"A": ["127.0.0.1", "127.0.0.2"]}}
    look = await discovery(server, NAME).look()
    assert {(one.address, one.source) for one in look.workers} == {
        ("127.0.0.1:7001", NAME),
        ("127.0.0.2:7001", NAME),
    }
    assert look.pool_nodes == ()


async def test_a_look_asks_anew_whatever_the_ttl_is(server):
    one = discovery(server, NAME)
    server.records = {"decode.test.": {"A": ["127.0.0.1"]}}
    assert await found(one) == {"127.0.0.1:7001"}
    server.records = {"decode.test.": {"A": ["127.0.0.2"]}}  # the first one had 300 s
    assert await found(one) == {"127.0.0.2:7001"}


async def test_addresses_of_version_six_count_where_there_are_none_of_version_four(server):
    server.records = {"decode.test.": {"AAAA": ["fd00::1"]}}
    assert await found(discovery(server, NAME)) == {"[fd00::1]:7001"}
    server.records["decode.test."]["A"] = ["127.0.0.1"]
    assert await found(discovery(server, NAME)) == {"127.0.0.1:7001"}


async def test_services_tell_hosts_and_ports(server):
    server.records = {
        SERVICE: {"SRV": ["0 10 7001 d0.decode.test.", "0 10 7002 d1.decode.test."]},
        "d0.decode.test.": {"A": ["127.0.0.1"]},
        "d1.decode.test.": {"AAAA": ["fd00::1"]},
    }
    assert await found(discovery(server, SERVICE)) == {"127.0.0.1:7001", "[fd00::1]:7002"}


async def test_a_service_that_says_there_is_none_names_nobody(server):
    server.records = {SERVICE: {"SRV": ["0 0 0 ."]}}
    assert await found(discovery(server, SERVICE)) == set()


async def test_a_name_that_does_not_exist_or_has_no_addresses_names_nobody(server):
    server.records = {"decode.test.": {"TXT": ['"x"']}}
    assert await found(discovery(server, NAME, "prefill.test.:7001", "_x._tcp.test.")) == set()


async def test_pool_nodes_have_names_of_their_own(server):
    server.records = {"decode.test.": {"A": ["127.0.0.1"]}, "pool.test.": {"A": ["127.0.0.9"]}}
    look = await discovery(server, NAME, pools=("pool.test.:9100",)).look()
    assert [one.address for one in look.pool_nodes] == ["127.0.0.9:9100"]
    assert [one.address for one in look.workers] == ["127.0.0.1:7001"]


@pytest.mark.parametrize("fault", ["servfail", "silence"])
async def test_while_no_server_answers_what_was_named_before_stays(server, fault):
    server.records = {"decode.test.": {"A": ["127.0.0.1"]}}
    one = discovery(server, NAME)
    assert await found(one) == {"127.0.0.1:7001"}
    server.rcode = dns.rcode.SERVFAIL if fault == "servfail" else None
    server.silent = fault == "silence"
    asked = server.asked
    look = await one.look()
    assert server.asked > asked
    assert [worker.address for worker in look.workers] == ["127.0.0.1:7001"]
    (why,) = look.faults
    assert why.startswith(f"{NAME}: no answer from DNS: ")
    server.rcode, server.silent, server.records = None, False, {}
    assert await found(one) == set()


@pytest.mark.parametrize("server", ["dns.example.org", "10.0.0.1:x", "", "10.0.0.1.2:53"])
def test_a_server_that_is_no_address_is_refused_by_name(server):
    with pytest.raises(ConfigError, match=r"cluster\.dns_servers: "):
        DnsDiscovery([NAME], servers=[server])


@pytest.mark.parametrize(
    "server", ["10.0.0.1", "10.0.0.1:53", "fd00::1", "[fd00::1]", "[fd00::1]:53"]
)
def test_servers_are_addresses_with_or_without_a_port(server):
    DnsDiscovery([NAME], servers=[server])
