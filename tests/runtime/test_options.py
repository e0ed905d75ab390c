"""Options with a wrong name: refused in the name of the function that was called, with the near ones."""

import asyncio
import inspect

import pytest

from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.options import check_options
from dflash_deploy.runtime.service import _OPEN_OPTIONS, Service
from toy_engines import toy_decoder
from toy_service import still_service

PROMPT = [5, 9, 2]


def calls(name):
    """Every public function that passes options on, called with one."""
    decoder = toy_decoder()
    service = still_service(decoder)
    option = {name: 1}
    return {
        "Decoder.stream": lambda: decoder.stream(PROMPT, 4, **option),
        "Decoder.generate": lambda: decoder.generate(PROMPT, 4, **option),
        "Service.submit": lambda: service.submit(PROMPT, 4, **option),
        "Service.submit_async": lambda: asyncio.run(service.submit_async(PROMPT, 4, **option)),
        "Service.generate": lambda: service.generate(PROMPT, 4, **option),
        "Session.submit": lambda: service.session().submit(PROMPT, 4, **option),
        "Session.send": lambda: service.session().send("hello", 4, **option),
    }


@pytest.mark.parametrize("function", calls("x"))
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temperature", "give sampling=Sampling(temperature=...)"),
        ("max_tokens", "near it: max_new_tokens"),
        ("stop_ids", "near it: stop_token_ids"),
        ("colour", "there are: "),
    ],
)
def test_an_option_of_a_request(function, name, words):
    with pytest.raises(TypeError) as error:
        calls(name)[function]()
    assert str(error.value).startswith(f"{function}() got an unexpected keyword argument {name!r}; {words}")


def test_a_deadline_is_the_services():
    with pytest.raises(TypeError, match=r"^Service.submit\(\) .*'deadline'; near it: deadline_s"):
        still_service(toy_decoder()).submit(PROMPT, deadline=3)
    with pytest.raises(TypeError, match=r"^Decoder.stream\(\) .*'deadline'; there are: prompt, "):
        toy_decoder().stream(PROMPT, deadline=3)


def test_settings_and_how_a_bundle_is_opened(tmp_path):
    with pytest.raises(TypeError, match=r"^Decoder.with_settings\(\) .*'verify_row'; near it: verify_rows$"):
        toy_decoder().with_settings(verify_row=3)
    for name, words in (
        ("thread", "near it: threads"),
        ("together", "there are: bundle, settings, "),
    ):
        with pytest.raises(TypeError, match=rf"^Service.open\(\) .*{name!r}; {words}"):
            Service.open(tmp_path, **{name: 1})
    assert {*_OPEN_OPTIONS} == {*inspect.signature(Decoder.open).parameters} - {
        *("bundle", "verify_rows", "together")
    }


def test_what_is_known_passes():
    check_options(Decoder.stream, (), ())
    check_options(Decoder.stream, ["mode"], ["mode", "chat"])
