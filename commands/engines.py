"""`dflash build-engine`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from .options import BACKENDS
from .shared import bundle_argument, progress_on_screen

_BOTH = ("target", "draft")
_GRAPHS = (*_BOTH, "round")
_WEIGHTS = ("embedded", "stripped")
_RESIDENCES = ("device", "streamed")
_PROFILES = ("phases", "one")
_VERBOSITIES = ("quiet", "info", "verbose")
_CONVS = ("function", "plugin")


@click.command("build-engine")
@bundle_argument
@click.option("--backend", type=click.Choice(BACKENDS), required=True)
@click.option(
    "--compute-capability",
    "compute_capabilities",
    multiple=True,
    metavar="X.Y",
    help="GPU generation to build for, e.g. 8.9; may be repeated [default: all from 8.0 on].",
)
@click.option(
    "--graph",
    "graphs",
    type=click.Choice(_GRAPHS),
    multiple=True,
    help="round: see docs/round.md [default: target and draft].",
)
@click.option("--max-batch", type=int, metavar="N", help="Most requests in one pass.")
@click.option("--max-prompt", type=int, metavar="N", help="Most rows of a prompt in one pass.")
@click.option("--max-context", type=int, metavar="N", help="Longest sequence [default: the bundle's].")
@click.option("--workspace-mb", type=int, metavar="N", help="Most scratch memory a layer may use.")
@click.option(
    "--weights", type=click.Choice(_WEIGHTS), help="Keep them in the engine, or in the bundle alone."
)
@click.option("--residence", type=click.Choice(_RESIDENCES), help="Where weights are while it runs.")
@click.option(
    "--timing-cache", type=click.Path(path_type=Path), help="File with what earlier builds measured."
)
@click.option(
    "--profiles",
    type=click.Choice(_PROFILES),
    help="One a phase, each tuned for it, or one for all [default: what suits the backend].",
)
@click.option("--verbosity", type=click.Choice(_VERBOSITIES), help="What is shown of TensorRT's messages.")
@click.option(
    "--conv",
    type=click.Choice(_CONVS),
    help="DFlash2's convolutions as nodes of the graph, or as our own CUDA kernel (tensorrt only; "
    "needs triton) [default: function].",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and its costs; build nothing.")
def build_engine_command(
    bundle: Path,
    backend: str,
    compute_capabilities: tuple[str, ...],
    graphs: tuple[str, ...],
    workspace_mb: int | None,
    weights: str | None,
    residence: str | None,
    profiles: str | None,
    verbosity: str | None,
    conv: str | None,
    dry_run: bool,
    **others: Any,
) -> None:
    """Build TensorRT engines into a bundle; needs no GPU with tensorrt-rtx."""
    from ..bundle.profiles import ProfileSet
    from ..exporter.engines.options import BuildOptions, Conv, Residence, Verbosity, Weights

    chosen = {
        "workspace_bytes": None if workspace_mb is None else workspace_mb << 20,
        "weights": None if weights is None else Weights(weights),
        "residence": None if residence is None else Residence(residence),
        "profile_set": None if profiles is None else ProfileSet(profiles),
        "verbosity": None if verbosity is None else Verbosity(verbosity),
        "conv": None if conv is None else Conv(conv),
        **others,
    }
    options = BuildOptions(**{name: value for name, value in chosen.items() if value is not None})
    if dry_run:
        from ..bundle.manifest import manifest_alone
        from ..exporter.engines.plan import plan_engines

        plan = plan_engines(bundle, manifest_alone(bundle), backend, compute_capabilities, graphs, options)
        click.echo("\n".join(plan.lines(shutil.disk_usage(bundle).free)))
        return
    from ..exporter.engines.build import build_engines

    manifest = build_engines(
        bundle, backend, compute_capabilities, graphs, progress_on_screen(), options=options
    )
    for name, engine in manifest.engines.items():
        if engine.backend == backend and engine.graph in (graphs or _BOTH):
            size = manifest.files[engine.file].bytes
            gpus = ", ".join(engine.compute_capabilities)
            click.echo(f"{name}: {size / 1e6:.1f} MB, {engine.precision}, compute capability {gpus}")
