"""Negative controls: deliberately damaged copies of an artifact, which the gate must refuse.

Each kind of damage is a file here, with one function from an artifact to what changes in it. To add one, write such a
function and name it in ``CONTROLS``.
"""

from quantpipe.controls.chat_template import wrong_chat_template
from quantpipe.controls.codes import codes_off_by_one
from quantpipe.controls.control import Control
from quantpipe.controls.kv_scales import kv_scales_of_one
from quantpipe.controls.other_layer import weights_of_another_layer
from quantpipe.controls.scales import scales_permuted
from quantpipe.controls.tokenizer import tokenizer_cut
from quantpipe.controls.zero_points import zero_points_off_by_one

CONTROLS: dict[str, Control] = {
    "scales permuted in one layer": scales_permuted,
    "zero points off by one": zero_points_off_by_one,
    "weight codes off by one": codes_off_by_one,
    "KV scales of 1.0": kv_scales_of_one,
    "one layer's weights are another's": weights_of_another_layer,
    "wrong chat template": wrong_chat_template,
    "tokenizer cut short": tokenizer_cut,
}
