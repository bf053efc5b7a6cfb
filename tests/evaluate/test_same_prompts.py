import json
import shutil
from pathlib import Path

from quantpipe.evaluate.same_prompts import PROBE_CONVERSATIONS, PROBE_TEXTS, prompt_mismatches

TEXTS = ["def read(self):", "return self.value"]
NUM_ASKED = len(TEXTS) + len(PROBE_TEXTS) + len(PROBE_CONVERSATIONS)


def test_a_folder_agrees_with_itself(tiny_llama: Path) -> None:
    found = prompt_mismatches(tiny_llama, tiny_llama, TEXTS)
    assert (found.value, found.high, found.num_samples) == (0, 0, NUM_ASKED)


def test_another_chat_template_and_a_missing_one_are_counted(tiny_llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_llama, tmp_path / "other"))
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    found = prompt_mismatches(tiny_llama, other, TEXTS)
    assert found.value == len(PROBE_CONVERSATIONS)
    assert found.detail.startswith("tokenizer: 0 of 6 texts; chat template: 3 of 3")
    template.unlink()
    assert prompt_mismatches(tiny_llama, other, TEXTS).value == len(PROBE_CONVERSATIONS)
    # a template written otherwise that says the same is no mismatch
    template.write_text("{# a comment #}" + (tiny_llama / "chat_template.jinja").read_text())
    assert prompt_mismatches(tiny_llama, other, TEXTS).value == 0


def test_another_tokenizer_is_counted(tiny_llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_llama, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:10]
    (other / "tokenizer.json").write_text(json.dumps(content))
    found = prompt_mismatches(tiny_llama, other, TEXTS)
    assert found.value == NUM_ASKED
