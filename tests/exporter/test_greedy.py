"""The greedy choice in a graph: the lowest best id, and -1 where a logit is not finite."""

import numpy as np
import pytest
import torch

from dflash_deploy.bundle.manifest import Verify, manifest_from_bundle
from dflash_deploy.exporter.bundle_graphs import TargetGraph
from dflash_deploy.exporter.modules.greedy import greedy_ids


def test_choices():
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [0.0, float("nan"), 9.0], [float("-inf"), 1.0, 2.0], [5.0, 1.0, 1.0]]
    )
    assert greedy_ids(logits).tolist() == [1, -1, -1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_graph_with_a_spoilt_cache_says_so(tiny_bundle, value):
    bundle = tiny_bundle("dflash2").bundle
    graph = TargetGraph(bundle, manifest_from_bundle(bundle, Verify.SIZES))
    graph.reset(16)
    graph.run(np.array([[5, 6, 7]]), 0)
    whole = graph.run(np.array([[8, 9]]), 3)
    assert (whole["greedy_ids"] == whole["logits"].argmax(-1)).all()
    graph._past["past_value.0"][:, :, 1] = value
    spoilt = graph.run(np.array([[8, 9]]), 3)
    assert not np.isfinite(spoilt["logits"]).all()
    assert (spoilt["greedy_ids"] == -1).all()
