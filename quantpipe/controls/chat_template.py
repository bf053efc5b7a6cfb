"""Another chat template: what a folder has whose template was left behind, or taken from another model."""

from quantpipe.controls.control import Damage
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.formats.artifact import Artifact

TEMPLATE_NAME = "chat_template.jinja"
OTHER_TEMPLATE = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def wrong_chat_template(artifact: Artifact) -> Damage | str:
    """Messages are marked in a way that the model has not learnt."""
    if Tokenizer.open(artifact.folder).chat_template is None:
        return "no chat template"
    return Damage(files={TEMPLATE_NAME: OTHER_TEMPLATE.encode()})
