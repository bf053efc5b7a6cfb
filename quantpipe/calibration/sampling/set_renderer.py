"""What renders the rows of one set: the base model's tokenizer, with the templates that its sources name."""

from pathlib import Path

from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.definition.sources import RowKeys
from quantpipe.calibration.templates.renderer import Renderer


def open_renderer(definition: SetDefinition, tokenizer_folder: Path) -> Renderer:
    """What renders the set's rows. Raises DataError where the tokenizer lacks what the set needs."""
    sources = enumerate(definition.sources)
    files = {
        index: definition.folder / source.template_file
        for index, source in sources
        if isinstance(source, RowKeys) and source.template_file is not None
    }
    renderer = Renderer(tokenizer_folder, files)
    if any(isinstance(source, RowKeys) and source.uses_template for source in definition.sources):
        renderer.require_template()
    return renderer
