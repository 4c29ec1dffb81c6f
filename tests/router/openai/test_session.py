"""By which name a request's session reaches routing."""

from tests.router.served import serve

HEADER = {"X-Baton-Session": "talk-7"}


async def session_of(headers=None, **fields) -> str:
    async with serve() as served:
        await served.complete(headers, **fields)
        return served.generator.requests[0].session


async def test_the_user_field_names_the_session():
    assert await session_of(user="ann") == "ann"


async def test_the_header_names_it_before_the_user_field_does():
    assert await session_of(HEADER, user="ann") == "talk-7"


async def test_without_either_there_is_no_name():
    assert await session_of() == ""


async def test_a_name_is_cut_short():
    assert len(await session_of({"X-Baton-Session": "x" * 5000})) == 256
