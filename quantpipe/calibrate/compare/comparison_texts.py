"""What calibration sets are compared on: texts that the user names, or the rows that the sets hold out, by domain."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantpipe.calibration import BuildContext
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import SetDefinition, set_in
from quantpipe.calibration.held_out.held_out_rows import read_held_out
from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.calibration.readers.files import require_files
from quantpipe.calibration.samples.self_text import WriteText
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RecipeError
from quantpipe.evaluate.divergence import windows_from_text
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.report import Progress

LEAST_WINDOWS = 2  # of one domain, for a mean that says something; a domain with fewer counts among several
MOST_DOMAINS = 8  # that windows are asked for; of a set with more, domains share them
Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class HeldOutText:
    """Windows of token ids of one domain, and where they are from."""

    label: str
    origin: str
    windows: Windows


@dataclass(frozen=True)
class Wanted:
    """How many windows of how many tokens for each domain, and the texts by label; none: what the sets hold out."""

    texts: Mapping[str, Path]
    num_windows: int = 16
    window_tokens: int = 256


def named_sets(folders: Sequence[Path]) -> dict[str, SetDefinition]:
    """The sets by name, in order. Raises RecipeError for fewer than two, or two of one name; and as ``load_set``."""
    sets: dict[str, SetDefinition] = {}
    for folder in folders:
        definition = set_in(folder.resolve())
        if not isinstance(definition, SetDefinition):
            raise RecipeError(f"--sets: {folder} holds blocks, which no seed changes; give the folder with set.yaml")
        if definition.name in sets:
            raise RecipeError(f"--sets: two sets are called '{definition.name}'; change `name` in one set.yaml")
        require_files(definition)
        sets[definition.name] = definition
    if len(sets) < 2:
        raise RecipeError(f"--sets: found {len(sets)}; name at least two, separated by a comma")
    return sets


def domain_texts(
    sets: Mapping[str, SetDefinition],
    wanted: Wanted,
    tokenizer_folder: Path,
    write: WriteText | None,
    progress: Progress,
) -> tuple[tuple[HeldOutText, ...], tuple[EvalText, ...]]:
    """The windows of each domain, and all of it as text, which no calibration row may overlap.

    Raises RecipeError where no text is named and no set holds rows out; DataError for too little text.
    """
    if wanted.texts:
        tokenizer = Tokenizer.open(tokenizer_folder)
        named = [
            HeldOutText(label, str(path), windows_from_text(path, tokenizer, wanted.num_windows, wanted.window_tokens))
            for label, path in wanted.texts.items()
        ]
        return tuple(named), tuple(text for path in wanted.texts.values() for text in eval_texts(None, path))
    holding = {name: definition for name, definition in sets.items() if definition.header.holdout is not None}
    if not holding:
        raise RecipeError(
            f"compare: none of {', '.join(sets)} holds rows out; add holdout: {{frac: 0.1}} to a set.yaml, or name "
            "held-out text with --on LABEL=PATH"
        )
    found: list[HeldOutText] = []
    texts: list[EvalText] = []
    with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch:
        context = BuildContext(work_folder=Path(scratch), generate=write)
        for name, definition in holding.items():
            num_windows = wanted.num_windows * _num_domains(definition)
            held_out = read_held_out(
                definition, tokenizer_folder, num_windows, wanted.window_tokens, context, progress, equally=True
            )
            found += _by_domain(name, held_out.by_domain())
            texts += held_out.texts
    return tuple(_distinct(found)), tuple(texts)


def _num_domains(definition: SetDefinition) -> int:
    """As many domains as its sources name; those that rows name are not known yet, and count as one."""
    return min(len({source.known_domain for source in definition.sources}), MOST_DOMAINS)


def _by_domain(name: str, windows: Mapping[str, Windows]) -> Iterable[HeldOutText]:
    origin = f"rows held out by {name}"
    rest: list[Sequence[int]] = []
    for domain, of_domain in windows.items():
        if len(of_domain) >= LEAST_WINDOWS and domain != SEVERAL:
            yield HeldOutText(domain or name, origin, of_domain)
        else:
            rest += of_domain
    if len(rest) >= LEAST_WINDOWS:
        yield HeldOutText(f"{name}: {SEVERAL}", origin, rest)


def _distinct(texts: Sequence[HeldOutText]) -> Iterable[HeldOutText]:
    """Texts whose labels several sets use are told apart by the set."""
    counts = Counter(text.label for text in texts)
    for text in texts:
        name = text.origin.removeprefix("rows held out by ")
        yield replace(text, label=f"{name}: {text.label}") if counts[text.label] > 1 else text
