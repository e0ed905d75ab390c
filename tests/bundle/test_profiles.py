"""The profile planner: whatever the loop asks for lies in a profile, and a profile is a profile."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.limits import KV_BUCKET, PREFILL_ROWS, ShapeLimits
from dflash_deploy.bundle.manifest import GraphInfo, Manifest
from dflash_deploy.bundle.profiles import (
    ProfileSet,
    fixed_axes,
    input_shapes,
    named_axes,
    plan_profiles,
    profile_for,
)
from dflash_deploy.bundle.tensors import (
    BATCH,
    CAPACITY,
    CONTEXT_ROWS,
    CONV,
    DRAFT,
    HIDDEN,
    KV,
    LOGIT_ROWS,
    ROWS,
    TARGET,
    DType,
    GraphIO,
    TensorInfo,
)
from dflash_deploy.runtime.decoder import Decoder, Settings
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode
from toy_engines import VOCAB, ToyDraft, ToyTarget, hash_of, toy_manifest
from toy_service import WildRows, prompt_of, turn, turn_until

SETS = list(ProfileSet)


@st.composite
def manifests(draw) -> Manifest:
    return toy_manifest(
        block_size=draw(st.integers(2, 20)),
        first_proposal_row=draw(st.integers(0, 1)),
        max_length=draw(st.integers(2, 3000)),
    )


@st.composite
def planned(draw) -> tuple[Manifest, ShapeLimits]:
    manifest = draw(manifests())
    length = draw(st.integers(2, manifest.max_length))
    rows, batch = draw(st.integers(1, PREFILL_ROWS)), draw(st.integers(1, 9))
    return manifest, ShapeLimits.from_manifest(manifest, length, rows, batch)


@given(planned(), st.sampled_from(SETS), st.sampled_from([TARGET, DRAFT]))
def test_profiles_are_ordered_ranges_of_every_axis(plan, profile_set, graph):
    manifest, limits = plan
    profiles = plan_profiles(manifest, graph, limits, profile_set)
    io = manifest.graphs[graph].io
    assert profiles
    assert len({str(ranges) for ranges in profiles.values()}) == len(profiles)
    if profile_set is ProfileSet.ONE:
        assert len(profiles) == 1
    for ranges in profiles.values():
        assert set(ranges) == set(named_axes(io.inputs))
        for least, typical, largest in ranges.values():
            assert 1 <= least <= typical <= largest
        assert ranges[CAPACITY] == (limits.capacity,) * 3
        for name, shapes in input_shapes(io, ranges).items():
            axes = next(t.axes for t in io.inputs if t.name == name)
            for shape in shapes:
                assert all(s == a for s, a in zip(shape, axes, strict=True) if isinstance(a, int))


@pytest.mark.parametrize("profile_set", SETS)
def test_the_first_prompt_token_over_an_empty_cache_has_a_profile(profile_set):
    manifest = toy_manifest()
    limits = ShapeLimits.from_manifest(manifest)
    target = plan_profiles(manifest, TARGET, limits, profile_set)
    draft = plan_profiles(manifest, DRAFT, limits, profile_set)
    fixed = {BATCH: 1, CAPACITY: limits.capacity, KV: KV_BUCKET}
    assert profile_for(target, {**fixed, ROWS: 1, LOGIT_ROWS: 1})
    assert profile_for(draft, {**fixed, CONTEXT_ROWS: 1})


class Planned:
    """Runners that look up the profile of every pass, as a runner over engines does."""

    def __init__(
        self,
        manifest: Manifest,
        spoilt: list[bool],
        profile_set: ProfileSet,
        length: int,
        rows: int = PREFILL_ROWS,
        batch: int = 1,
    ):
        self.asked: list[tuple[str, str]] = []
        self.limits = ShapeLimits.from_manifest(manifest, length, rows, batch)
        pattern = itertools.cycle(spoilt)
        draft = ToyDraft(manifest, lambda position, index: next(pattern))
        self.runners = {TARGET: ToyTarget(manifest), DRAFT: draft}
        for graph, runner in self.runners.items():
            profiles = plan_profiles(manifest, graph, self.limits, profile_set)
            self.watch(graph, runner, profiles)

    def watch(self, graph, runner, profiles):
        def checked(sizes):
            axes = {a for ranges in profiles.values() for a in ranges}
            # An engine's cache has its full capacity, whatever the request needs.
            name = profile_for(
                profiles, {a: sizes[a] if a != CAPACITY else self.limits.capacity for a in axes}
            )
            self.asked.append((graph, name))

        runner.before = checked


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    block=st.integers(2, 17),
    first=st.integers(0, 1),
    profile_set=st.sampled_from(SETS),
    spoilt=st.lists(st.booleans(), min_size=1, max_size=12),
    exact=st.booleans(),
    mode=st.sampled_from([Mode.SPECULATIVE, Mode.SPECULATIVE, Mode.PLAIN]),
)
def test_whatever_the_loop_asks_for_lies_in_a_profile(data, block, first, profile_set, spoilt, exact, mode):
    longest = data.draw(st.sampled_from([3, 17, 64, 130, 400, 700]), label="max_length")
    manifest = toy_manifest(block_size=block, first_proposal_row=first, max_length=longest)
    length = data.draw(st.integers(2, longest), label="limit")
    prompt = data.draw(st.integers(1, length - 1), label="prompt")
    rest = length - prompt
    new = data.draw(st.one_of(st.integers(1, min(40, rest)), st.just(rest)), label="new")
    verify = data.draw(st.integers(2, manifest.draft.proposals + 1), label="verify_rows")
    watched = Planned(manifest, spoilt, profile_set, length)
    decoder = Decoder(
        manifest, watched.runners[TARGET], watched.runners[DRAFT], None, Settings(verify, exact, length)
    )
    result = decoder.generate(
        [hash_of([i]) % VOCAB for i in range(prompt)], new, mode=mode, stop_token_ids=()
    )
    assert result.stats.draft_failures == 0, result.stats.draft_failure
    assert len(result.ids) == new
    assert len(watched.asked) == sum(len(runner.calls) for runner in watched.runners.values())


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    block=st.integers(2, 12),
    first=st.integers(0, 1),
    profile_set=st.sampled_from(SETS),
    spoilt=st.lists(st.booleans(), min_size=1, max_size=12),
    exact=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_a_service_asks_for_lies_in_a_profile(data, block, first, profile_set, spoilt, exact, seed):
    """Several requests at once, other rows in each round, plain rounds that leave features behind."""
    longest = data.draw(st.sampled_from([3, 17, 64, 130, 300]), label="max_length")
    manifest = toy_manifest(block_size=block, first_proposal_row=first, max_length=longest)
    length = data.draw(st.integers(2, longest), label="limit")
    batch, rows = data.draw(st.integers(1, 5), label="batch"), data.draw(st.integers(1, 100), label="rows")
    watched = Planned(manifest, spoilt, profile_set, length, rows, batch)
    target, draft = watched.runners[TARGET], watched.runners[DRAFT]
    target.limits = draft.limits = watched.limits
    decoder = Decoder(manifest, target, draft, None, Settings(2, exact, length))
    requests = data.draw(st.integers(1, batch), label="max_requests")
    service = Service(decoder, ServiceSettings(max_requests=requests), start=False)
    service._scheduler._policy = WildRows(manifest.draft.proposals + 1, seed)
    chance = random.Random(seed)
    tickets = []
    for index in range(2 * requests):
        prompt = prompt_of(chance.choice([1, length - 1, chance.randint(1, length - 1)]), index)
        mode = chance.choice([Mode.SPECULATIVE, Mode.SPECULATIVE, Mode.PLAIN])
        tickets.append(service.submit(prompt, chance.choice([3, length]), mode=mode, stop_token_ids=()))
        turn(service, chance.randint(0, 9))
    turn_until(service, tickets)
    for ticket in tickets:
        stats = ticket.result(0).stats
        assert stats.draft_failures == 0, stats.draft_failure
    assert len(watched.asked) == sum(len(runner.calls) for runner in watched.runners.values())


def test_a_pass_of_more_requests_than_planned_is_refused_by_name():
    manifest = toy_manifest()
    profiles = plan_profiles(manifest, TARGET, ShapeLimits.from_manifest(manifest, 100, batch=4))
    sizes = {BATCH: 5, CAPACITY: 108, KV: 108, ROWS: 8, LOGIT_ROWS: 8}
    with pytest.raises(EngineError, match=r"batch: got 5, expected 1 to 4"):
        profile_for(profiles, sizes)


def test_each_phase_gets_its_own_profile():
    manifest = toy_manifest()
    watched = Planned(manifest, [False, False, True], ProfileSet.PHASES, 400)
    decoder = Decoder(manifest, watched.runners[TARGET], watched.runners[DRAFT], None, Settings(8, True, 400))
    decoder.generate([3] * 30, 40, stop_token_ids=())
    decoder.generate([3] * 30, 4, mode=Mode.PLAIN, stop_token_ids=())
    assert set(watched.asked) == {
        (TARGET, "plain"),
        (TARGET, "verify"),
        (TARGET, "prefill"),
        (DRAFT, "round"),
        (DRAFT, "prefill"),
    }


def test_a_pass_outside_the_limits_is_refused_by_name():
    manifest = toy_manifest()
    profiles = plan_profiles(manifest, TARGET, ShapeLimits.from_manifest(manifest, 100))
    sizes = {BATCH: 1, CAPACITY: 108, KV: 109, ROWS: 8, LOGIT_ROWS: 8}
    with pytest.raises(EngineError, match=r"kv: got 109, expected 64 to 108, .*larger limits"):
        profile_for(profiles, sizes)
    with pytest.raises(EngineError, match=r"no profile of the engine covers \(plain, verify, prefill\)"):
        profile_for(profiles, {**sizes, KV: 108, ROWS: 30})


def test_axes_of_one_size_are_fixed():
    manifest = toy_manifest()
    one = ShapeLimits.from_manifest(manifest, 100)
    assert fixed_axes(plan_profiles(manifest, TARGET, one)) == {BATCH: 1, CAPACITY: 108}
    several = replace(one, batch=4)
    assert fixed_axes(plan_profiles(manifest, TARGET, several)) == {CAPACITY: 108}
    tiny = ShapeLimits.from_manifest(manifest, 40)
    assert fixed_axes(plan_profiles(manifest, DRAFT, tiny)) == {BATCH: 1, CAPACITY: 48, KV: 48}


def test_equal_phases_are_planned_once():
    limits = ShapeLimits.from_manifest(toy_manifest(block_size=2))
    assert list(plan_profiles(toy_manifest(block_size=2), TARGET, limits)) == ["plain", "prefill"]


def test_one_profile_is_tuned_for_the_rounds():
    manifest = toy_manifest(max_length=4000)
    limits = ShapeLimits.from_manifest(manifest)
    (ranges,) = plan_profiles(manifest, TARGET, limits, ProfileSet.ONE).values()
    assert ranges[ROWS] == (1, 8, PREFILL_ROWS)
    assert ranges[LOGIT_ROWS] == (1, 8, 8)
    assert ranges[KV] == (KV_BUCKET, 1024, limits.capacity)


@pytest.mark.parametrize("profile_set", SETS)
def test_graphs_by_themselves_have_profiles(profile_set):
    manifest = toy_manifest()
    io = GraphIO((TensorInfo(HIDDEN, DType.FLOAT32, (BATCH, ROWS, 16)),), ())
    manifest = replace(manifest, graphs={**manifest.graphs, CONV: GraphInfo("conv.onnx", 24, 11, io)})
    limits = ShapeLimits.from_manifest(manifest, batch=3)
    (ranges,) = plan_profiles(manifest, CONV, limits, profile_set).values()
    assert input_shapes(io, ranges) == {HIDDEN: ((1, 1, 16), (3, 8, 16), (3, 8, 16))}
