"""Whether a base model's config.json is on this machine already; nothing is fetched to find out."""

from pathlib import Path

from quantpipe.recipe.schema import ModelSection
from quantpipe.sources.base_model import local_config
from quantpipe.sources.gguf_model import CONVERSION_VERSION

DIGEST = "0" * 64
PYPI = "pypi:some==1.0/some/model.gguf"


def test_a_folders_config_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    assert local_config(ModelSection(source="./base"), tmp_path, tmp_path) == tmp_path / "base" / "config.json"


def test_a_file_that_was_dequantized_before_is_known_by_its_digest(tmp_path: Path) -> None:
    model = ModelSection(source=PYPI, sha256=DIGEST)
    assert local_config(model, tmp_path, tmp_path) is None
    folder = tmp_path / "models" / f"{DIGEST}-bfloat16-v{CONVERSION_VERSION}"
    folder.mkdir(parents=True)
    assert local_config(model, tmp_path, tmp_path) == folder / "config.json"


def test_a_file_without_a_digest_and_a_hub_model_that_was_never_fetched_are_not_known(tmp_path: Path) -> None:
    assert local_config(ModelSection(source="model.gguf"), tmp_path, tmp_path) is None
    assert local_config(ModelSection(source="nobody/no-such-model-of-theirs"), tmp_path, tmp_path) is None
