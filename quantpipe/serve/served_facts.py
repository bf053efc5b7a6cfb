"""What is served, for people: the artifact, its schemes, and the verdict on it if there is one that is about it."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact
from quantpipe.serve.gate_check import find_verdict

# Settings of an engine that change what a model says, if only a little.
NUMERIC_SETTINGS = ("backend", "kv_dtype", "activations", "activation_divisor", "window_tokens", "sink_tokens")


@dataclass(frozen=True)
class GateFacts:
    """A verdict in words (``PASS``, ``PASS with waivers``, ``FAIL``, ``UNSURE``), by which recipe (its digest: SHA-256
    in hex), and when.

    ``served_otherwise`` are the engine settings that were others when it was judged.
    """

    verdict: str
    recipe: str
    recipe_digest: str
    date: str
    served_otherwise: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServedFacts:
    """``schemes`` are numbers of layers by scheme. ``gate`` is None where no verdict on these very files is known.

    ``digest`` tells folders apart (``Artifact.quick_digest``).
    """

    artifact: str
    digest: str
    kv_cache: str
    backend: str
    schemes: Mapping[str, int] = field(default_factory=dict)
    gate: GateFacts | None = None


class FactsReader:
    """What is known of a folder. The verdict comes later, from a thread of its own: weights are hashed for it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, EngineConfig.of(settings)
        self._facts = served_facts(folder, self._config)

    def read(self) -> ServedFacts:
        """What is known by now."""
        return self._facts

    def look_for_verdict(self) -> None:
        """Begin to read the verdict, and what it is about."""
        threading.Thread(target=self._look, name="verdict", daemon=True).start()

    def _look(self) -> None:
        self._facts = replace(self._facts, gate=gate_facts(self._folder, self._config))


def served_facts(folder: Path, config: EngineConfig) -> ServedFacts:
    """What the headers of ``folder`` say. Raises ArtifactError where it is damaged."""
    artifact = Artifact.open(folder)
    schemes = Counter(scheme.label for scheme in artifact.schemes.values())
    return ServedFacts(
        artifact=folder.resolve().name,
        digest=artifact.quick_digest,
        kv_cache=config.kv_dtype or artifact.kv_cache,
        backend=config.backend,
        schemes=dict(sorted(schemes.items())),
    )


def gate_facts(folder: Path, config: EngineConfig) -> GateFacts | None:
    """The verdict on what ``folder`` holds now, if one lies beside it: its weights are hashed."""
    found = find_verdict(folder)
    if found is None:
        return None
    try:
        artifact = Artifact.open(folder)
    except DataError:
        return None
    context = found.context
    served = asdict(config) | {"kv_dtype": config.kv_dtype or artifact.kv_cache}
    otherwise = tuple(name for name in NUMERIC_SETTINGS if context.engine.get(name) != served[name])
    return GateFacts(found.result.title, context.recipe_name, context.recipe_digest, context.date, otherwise)
