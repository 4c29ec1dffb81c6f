"""Keeps the directory of tenants true to the document, while serving. What is wrong is said and counted, and changes
nothing: the tenants stay those of the last good document.
"""

import asyncio
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.errors import BatonError, ConfigError
from baton.telemetry.logs import get_logger
from router.tenants.directory import TenantDirectory
from router.tenants.sources import Edition, TenantSource

_log = get_logger(__name__)


class ReloadMetrics:
    """What became of the documents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reloads = Counter(
            "baton_tenants_reloads", "Tenants documents taken over.", registry=registry
        )
        self._failures = Counter(
            "baton_tenants_reload_failures",
            "Looks at the tenants document that failed; the last good one holds.",
            registry=registry,
        )
        self._tenants = Gauge("baton_tenants", "Tenants described.", registry=registry)
        self._stale = Gauge(
            "baton_tenants_stale",
            "1 while the tenants document is wrong or cannot be read, and the last good one holds.",
            registry=registry,
        )

    def reloaded(self, num_tenants: int) -> None:
        """A document was taken over."""
        self._reloads.inc()
        self._tenants.set(num_tenants)

    def failed(self) -> None:
        """A look failed."""
        self._failures.inc()

    def stale(self, is_stale: bool) -> None:
        """Whether what holds is older than what there is to be read."""
        self._stale.set(is_stale)


class TenantReloader:
    """Looks for a new document every few seconds.

    Args:
        source: Where it comes from.
        directory: What follows it.
        metrics: Counts.
        pause_s: Between two looks.
        slo_classes: Names of the configured classes; a tenant of another is served as `standard`, and that is said.
    """

    def __init__(
        self,
        source: TenantSource,
        directory: TenantDirectory,
        metrics: ReloadMetrics,
        *,
        pause_s: float,
        slo_classes: Collection[str],
    ) -> None:
        self._source = source
        self._directory = directory
        self._metrics = metrics
        self._pause_s = pause_s
        self._slo_classes = slo_classes
        self._answered = True
        self._turn = asyncio.Lock()
        self._wrong: ConfigError | None = None
        """What is wrong with the last document; None for nothing."""

    async def load(self) -> bool:
        """Takes over what is new; whether anything was. Of several at once each waits for the one before: an older
        document that takes longer to read never replaces a newer one.

        Raises:
            ConfigError: The document is wrong, also one that was found to be so before.
            UnavailableError: Redis gives no answer.
        """
        async with self._turn:
            try:
                loaded = await self._take_over()
            except BatonError as error:
                if isinstance(error, ConfigError):
                    self._wrong = error
                self._metrics.stale(True)
                raise
            self._metrics.stale(False)
            return loaded

    async def _take_over(self) -> bool:
        edition = await self._source.next_edition()
        if edition is None:
            if self._wrong is not None:
                raise ConfigError(self._wrong.message, param=self._wrong.param)
            return False
        register = await asyncio.to_thread(
            self._directory.register_of, edition.document, edition.key_files.__getitem__
        )
        self._wrong = None
        self._directory.replace(register)
        self._metrics.reloaded(len(register.tenants))
        self._say(edition)
        return True

    async def look(self) -> bool:
        """The same, but what is wrong is only said and counted, and that once."""
        known = self._wrong
        try:
            loaded = await self.load()
        except ConfigError as error:
            if known is None or known.message != error.message:
                self._metrics.failed()
                _log.warning(
                    "the tenants document is wrong, the last good one holds", why=error.message
                )
            return False
        except BatonError as error:
            self._metrics.failed()
            if self._answered:
                why = error.message
                _log.warning(
                    "the tenants document cannot be looked at, what was read last holds", why=why
                )
            self._answered = False
            return False
        self._answered = True
        return loaded

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            await self.look()

    def _say(self, edition: Edition) -> None:
        document = edition.document
        _log.info("tenants loaded", tenants=len(document.tenants), issuers=len(document.jwt))
        for entry in document.tenants:
            if entry.slo_class not in self._slo_classes:
                _log.warning(
                    "a tenant's SLO class is not configured; standard holds",
                    tenant=entry.id,
                    slo_class=entry.slo_class,
                )
