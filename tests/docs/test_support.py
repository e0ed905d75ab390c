"""docs/support.md says what the code says."""

from dflash_deploy.exporter.engines.backends import BACKENDS
from support_table import COMMAND, PAGE, support_page


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == support_page(), (
        f"docs/support.md is not up to date; run: {COMMAND}"
    )


def test_the_page_on_engines_names_the_same_generations():
    text = (PAGE.parent / "engines.md").read_text(encoding="utf-8")
    for backend in BACKENDS.values():
        assert ", ".join(backend.generations) in text
