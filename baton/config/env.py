"""The one module that touches `os.environ`: settings from `BATON_<SECTION>_<FIELD>`, and what children inherit."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from baton.config.setting import SECRETS, SECTIONS, TYPES, Setting
from baton.errors import ConfigError

PREFIX = "BATON_"

PATHS = {PREFIX + path.replace(".", "_").upper(): path for path in TYPES}
"""Name of the variable of every setting."""

FILES = {f"{name}_FILE": name for name, path in PATHS.items() if path in SECRETS}
"""Variables that name a file with a secret, such as BATON_CLUSTER_SECRET_FILE, and the variable whose place each takes:
a file can be mounted for one process, and is neither inherited nor shown with the environment.
"""

STANDARD = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "trace.endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "trace.endpoint",
}
"""Variables of other standards that give a setting, unless ours does; of two the later one wins."""

_RAY_HEAD_WAIT_S = 30 * 24 * 3600
_SPINS = "1000"  # of GNU's runtime, which torch brings; with the policy alone threads sleep at once

# Kubernetes describes each service of the namespace in variables of these forms. A service named `baton-router` thus
# makes BATON_ROUTER_SERVICE_HOST and even BATON_ROUTER_PORT=tcp://10.0.0.7:8000, which is not meant as a setting.
_SERVICE_LINK_NAME = re.compile(r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)$")
_SERVICE_LINK_VALUE = re.compile(r"^(tcp|udp)://")


def settings(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """The settings that the environment gives. An empty value counts as not given.

    Raises:
        ConfigError: A variable has the form of a setting of a known section, but there is no such setting; or one names
            a file with a secret that cannot be read, is empty, or is given beside the secret itself.
    """
    given = os.environ if environ is None else environ
    found = [
        Setting(path=path, value=given[name], source=name, is_text=True)
        for name, path in STANDARD.items()
        if given.get(name)
    ]
    for name, value in _ours(given):
        if name in FILES:
            found.append(_secret_from_file(name, value, given))
            continue
        if name not in PATHS:
            raise ConfigError(f"{name}: no such setting{_suggestion(name)}", param=name)
        found.append(Setting(path=PATHS[name], value=value, source=name, is_text=True))
    return found


def child_environment(
    *, num_threads: int, threads_sleep: bool = False, import_path: str | None = None
) -> dict[str, str]:
    """What a child process inherits: everything but our settings, which it gets over its lifeline.

    Args:
        num_threads: For OpenMP, whose pool is sized before any of our code in the child can speak.
        threads_sleep: See `have_threads_sleep`.
        import_path: Directory to import Baton from when it is not installed.
    """
    ours = PATHS.keys() | FILES.keys()
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    inherited["OMP_NUM_THREADS"] = str(num_threads)
    if threads_sleep:
        have_threads_sleep(inherited)
    # The router has no torch on purpose; transformers need not advise on it at every start.
    inherited["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    # Its C core tells of every connection that ends well, on standard error and past our logs.
    inherited.setdefault("GRPC_VERBOSITY", "ERROR")
    if import_path is not None:
        rest = inherited.get("PYTHONPATH")
        inherited["PYTHONPATH"] = f"{import_path}{os.pathsep}{rest}" if rest else import_path
    return inherited


def authenticate_ray(new_token: str | None) -> None:
    """Turns Ray's token authentication on, unless the operator has decided; Ray reads this when it is imported.

    Args:
        new_token: Of a Ray that is about to be started; None where one runs, whose token the operator has given to Ray.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if new_token is not None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", new_token)


def outlast_ray_head() -> None:
    """Has Ray's processes here wait for a head that is away instead of ending after a minute, unless the operator has
    decided; Ray reads this when it is imported, and hands it to nodes that it starts.
    """
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_RAY_HEAD_WAIT_S))


def have_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Has OpenMP's threads sleep once they have waited for each other for some microseconds, unless the operator says
    otherwise: by themselves they wait busily, on cores that other processes wait for, and where they sleep at once
    waking them takes longer than many a loop. It reads this when it is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys():
        environ["OMP_WAIT_POLICY"] = "passive"
        environ["GOMP_SPINCOUNT"] = _SPINS


def quiet_grpc() -> None:
    """Keeps gRPC's core from a line on standard error for every connection that fails its handshake.
    It reads this when it is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _secret_from_file(name: str, file: str, environ: Mapping[str, str]) -> Setting:
    """The secret in `file`, without white space around it: editors and `echo` end files with a line break."""
    instead = FILES[name]
    if environ.get(instead):
        raise ConfigError(f"{name}: given beside {instead}; give one of the two", param=name)
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{name}: {file}: {(error.strerror or str(error)).lower()}", param=name
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {file}: not UTF-8 text", param=name) from error
    if not text:
        raise ConfigError(f"{name}: {file}: is empty", param=name)
    return Setting(path=PATHS[instead], value=text, source=name, is_text=True)


def _ours(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    sections = tuple(f"{PREFIX}{section.upper()}_" for section in SECTIONS)
    for name, value in sorted(environ.items()):
        is_link = _SERVICE_LINK_NAME.search(name) or _SERVICE_LINK_VALUE.match(value)
        if name.startswith(sections) and value and not is_link:
            yield name, value


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, PATHS, n=1)
    return f"; did you mean {near[0]}?" if near else ""
