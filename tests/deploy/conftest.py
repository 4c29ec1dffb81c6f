"""What several modules here look at."""

import pytest

from tests.deploy.manifests import OVERLAYS, Rendered, rendered


@pytest.fixture(params=OVERLAYS)
def cluster(request: pytest.FixtureRequest) -> Rendered:
    """Each overlay in turn."""
    return rendered(request.param)
