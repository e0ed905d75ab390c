"""What is of the wrong kind is refused by name, before anything runs; nothing raises a bare TypeError."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dflash_deploy.bundle.errors import ProviderError, RequestError
from dflash_deploy.bundle.manifest import Verify
from dflash_deploy.runtime.checks import check_flag, check_integer, check_number
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.service import Service, ServiceSettings
from text_bundle import write_text_bundle

NEITHER = ("a", b"a", 2.5, [1], {}, object(), float("nan"))  # no integer and no flag


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checks") / "bundle"
    write_text_bundle(directory)
    return directory


@pytest.fixture(scope="module")
def decoder(bundle) -> Iterator[Decoder]:
    with Decoder.open(bundle, threads=1) as made:
        yield made


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3)])
def test_what_counts_as_an_integer(value):
    found = check_integer("x", value, "3", 3, 3)
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [*NEITHER, True, False, np.True_, None, 2, 5])
def test_what_does_not(value):
    with pytest.raises(RequestError, match=r"^x: got .*, expected 3 or 4; try harder$"):
        check_integer("x", value, "3 or 4", 3, 4, "try harder")


def test_numbers_and_flags():
    check_number("x", np.float32(0.5), "", lambda x: x > 0)
    check_flag("x", False)
    for value in (*NEITHER, None, True):
        if value != 2.5:
            with pytest.raises(RequestError, match="x: got"):
                check_number("x", value, "a number", lambda x: True)
        if value is not True:
            with pytest.raises(RequestError, match=r"x: got .*, expected True or False"):
                check_flag("x", value)


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("threads", RequestError, (*NEITHER, True, 0)),
        ("verify_rows", RequestError, (*NEITHER, True, 0)),
        ("max_length", RequestError, (*NEITHER, True, 0)),
        ("exact", RequestError, (*NEITHER, None, 1)),
        ("verify", RequestError, (*NEITHER, None, True, "hashes")),  # not a check that silently is none
        ("provider", ProviderError, (*NEITHER, None)),
        ("backend", ProviderError, (*NEITHER, None)),
    ],
)
def test_opening(bundle, name, kind, values):
    for value in values:
        with pytest.raises(kind, match=f"^{name}: got"):
            Decoder.open(bundle, **{"threads": 1, name: value})


def test_numbers_that_no_float_holds_and_numbers_that_are_no_floats():
    for value in (10**400, -(10**400), Fraction(1, 2)):
        with pytest.raises(RequestError, match="x: got"):
            check_number("x", value, "a number", lambda x: True)


def test_a_services_settings_are_its_own(bundle):
    with pytest.raises(RequestError, match=r"settings: got .*, expected a ServiceSettings"):
        Service.open(bundle, {"max_requests": 1}, threads=1)
    with pytest.raises(RequestError, match=r"set ServiceSettings\.verify_rows"):
        Service.open(bundle, verify_rows=3, threads=1)


def test_messages_want_the_chat_template(decoder):
    with pytest.raises(RequestError, match="chat: got False"):
        decoder.stream([{"role": "user", "content": "hello"}], chat=False)


def test_where_a_bundle_is(bundle):
    for value in (None, 5, b"x", [bundle]):
        with pytest.raises(RequestError, match=r"^bundle: got .*, expected a path"):
            Decoder.open(value)
    Decoder.open(str(bundle), threads=1, verify=Verify.SIZES).close()


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        2.5,
        b"ab",
        bytearray(b"ab"),
        {1, 2},
        {"role": "user"},
        iter([1]),
        np.array(1),
        np.eye(2),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_prompts_that_are_none(decoder, prompt):
    with pytest.raises(
        RequestError, match=r"^prompt: got .*(?s:.)*expected a text, token ids or chat messages"
    ):
        decoder.stream(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        ["a"],
        [None],
        [1.5],
        [[1]],
        [5, {}],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "x"}, 5],
        np.array([0.5]),
    ],
)
def test_prompts_with_something_else_inside(decoder, prompt):
    with pytest.raises(RequestError, match=r"prompt|chat template"):
        decoder.stream(prompt)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", (*NEITHER, None, True)),
        ("min_new_tokens", (*NEITHER, None, True)),
        ("mode", (*NEITHER, None, "plain")),
        ("chat", (*NEITHER, None, 1)),
        ("system", (b"a", 2.5, [1], {}, object())),
        ("stop", (2.5, object(), 5, True, [5], b"ab")),
        ("stop_token_ids", (2.5, object(), 5, True, "a", ["a"], {}, b"ab", np.array(1))),
        ("sampling", (*NEITHER, None)),
    ],
)
def test_options(decoder, name, values):
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name}(\[0\])?: got"):
            decoder.stream("hello", **{name: value})


@pytest.mark.parametrize("name", Sampling.__dataclass_fields__)
def test_sampling(decoder, name):
    for value in ("a", b"a", [1], object(), float("nan"), True):
        with pytest.raises(RequestError, match=f"^{name}: got"):
            decoder.stream("hello", sampling=Sampling(**{"temperature": 1.0, name: value}))


def test_sets_and_arrays_of_stop_ids_will_do(decoder):
    for ids in ({1, 12}, np.array([1, 12]), (1, 12), range(12, 13)):
        assert decoder.generate("hello", 9, stop_token_ids=ids).ids == (29, 12)


@pytest.mark.parametrize("name", ServiceSettings.__dataclass_fields__)
def test_service_settings(decoder, name):
    for value in (*NEITHER, True, -1):
        with pytest.raises(RequestError, match=f"^{name}: got"):
            Service(decoder, ServiceSettings(**{name: value}))


@pytest.mark.parametrize("name", ["deadline_s", "wait_s"])
def test_times(decoder, name):
    with Service(decoder, ServiceSettings(max_requests=1)) as service:
        for value in ("a", b"a", [1], {}, object(), float("nan"), True, -1):
            with pytest.raises(RequestError, match=f"^{name}: got"):
                service.submit("hello", **{name: value})
