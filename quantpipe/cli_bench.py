"""The ``bench`` command: one model folder, timed in this process. Everything heavy is imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantpipe.cli_options import engine_option, naming_options, read_settings

if TYPE_CHECKING:
    from quantpipe.backends.protocol import Activations

VOCABULARY_TEXT_FACTOR = 8


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--concurrency", "-c", multiple=True, default=(1, 8, 32), show_default=True, type=click.IntRange(min=1))
@click.option("--prompt-tokens", default=150, show_default=True, type=click.IntRange(min=1))
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(min=2))
@click.option("--profile", is_flag=True, help="Show how the time of a step divides.")
@click.option("--backend", default="cpu", show_default=True, type=click.Choice(["cpu", "torch", "triton", "reference"]))
@click.option("--kv-dtype", metavar="MODE", help="A `kv_cache` of recipes. Default: as the gate judged.")
@click.option(
    "--activations",
    default="int16",
    show_default=True,
    type=click.Choice(["int8", "int16", "float32"]),
    help="What they are rounded to under weight-only schemes.",
)
@click.option("--num-threads", type=click.IntRange(min=1), help="CPU threads. Default: all cores.")
@engine_option
def bench(
    artifact: Path,
    concurrency: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    profile: bool,
    backend: str,
    kv_dtype: str | None,
    activations: "Activations",
    num_threads: int | None,
    engine_settings: tuple[str, ...],
) -> None:
    """Time ARTIFACT by itself: greedy, all requests of a concurrency at once, prompts of random tokens.

    The engine runs as many sequences as the largest concurrency, each as long as its prompt and what follows, unless
    --engine says otherwise.
    """
    from quantpipe.bench.alone import bench_alone
    from quantpipe.bench.workload import vocabulary_text
    from quantpipe.engine.config import EngineConfig
    from quantpipe.engine.engine import Engine

    flags: dict[str, Any] = {
        "backend": backend,
        "kv_dtype": kv_dtype,
        "activations": activations,
        "num_threads": num_threads,
    }
    sizes = {
        "max_num_seqs": max(concurrency),
        "max_num_batched_tokens": max(512, *concurrency),
        "max_model_len": prompt_tokens + new_tokens,
    }
    with naming_options(flags):
        engine = Engine.open(artifact, EngineConfig.of(sizes | flags | read_settings(engine_settings, flags)))
    for note in engine.backend_notes:
        click.echo(f"note: {note}", err=True)
    num_tokens = VOCABULARY_TEXT_FACTOR * (prompt_tokens + sum(concurrency))
    text = vocabulary_text(engine.description.vocab_size, engine.description.eos_token_ids, num_tokens, seed=0)
    click.echo(bench_alone(engine, concurrency, text, prompt_tokens, new_tokens, profile), nl=False)
