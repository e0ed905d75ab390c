from pathlib import Path

import pytest

from dflash_deploy.bench import peers
from dflash_deploy.bench.peers import PeerKind


@pytest.fixture
def fake_peer(monkeypatch):
    """A program named `fake`, whose file stands beside this one."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    kind = PeerKind("fake_peer", ("json",), "pip install fake==1")
    monkeypatch.setitem(peers.PEERS, "fake", kind)
