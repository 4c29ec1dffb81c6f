"""One value given for one setting, with the place it came from, and what type every setting has."""

from dataclasses import dataclass, fields
from typing import get_type_hints

from baton.config.schema import BatonConfig

SECTIONS: dict[str, type] = get_type_hints(BatonConfig)

TYPES: dict[str, object] = {
    f"{section}.{name}": declared
    for section, owner in SECTIONS.items()
    for name, declared in get_type_hints(owner).items()
}
"""Type of every setting by its path, such as `router.port`."""

SECRETS = frozenset(
    {
        "admin.api_keys",
        "cluster.redis_url",
        "cluster.secret",
        "pool.redis_url",
        "router.api_keys",
        "tenants.redis_url",
    }
)
"""Never shown: not in an error, not in a log, not in the environment or arguments of a child process. Each can be given
as a file (`baton.config.env.FILES`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that a person gave.

    Attributes:
        path: `section.field`, a key of `TYPES`.
        value: As it was read; not yet converted.
        source: How to name its place in an error: `cluster.yaml: router.port`, `BATON_ROUTER_PORT`, `--port`.
        is_text: The value is a string that stands for something else (an environment variable).
    """

    path: str
    value: object
    source: str
    is_text: bool = False


def section_fields(section: str) -> list[str]:
    """Names of the fields of `section`, in the order of the schema."""
    return [field.name for field in fields(SECTIONS[section])]
