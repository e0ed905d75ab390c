import pytest

from dflash_deploy.bundle.manifest import manifest_from_bundle


@pytest.fixture
def manifest_of():
    """Read a bundle's manifest."""
    return manifest_from_bundle
