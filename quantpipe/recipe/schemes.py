"""What a recipe's schemes store: from its words to ``WeightScheme``."""

from quantpipe.formats.scheme import WeightScheme, w8a8, weight_only
from quantpipe.recipe.quantize_section import W8A8, Scheme


def scheme_of(section: Scheme) -> WeightScheme:
    """The storage scheme that a part of a recipe names."""
    if isinstance(section, W8A8):
        return w8a8()
    group_size = None if section.group_size == "channel" else section.group_size
    return weight_only(int(section.name[1]), group_size, section.symmetric)
