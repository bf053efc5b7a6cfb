"""The committed tiny model is small, loads, and has learned enough for quantization damage to show."""

import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "fixtures" / "tiny_llama"
CONTEXT = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_tiny_llama_is_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6_000_000


@torch.inference_mode()
def test_perplexity_on_a_held_out_module_is_far_below_unigram(tokenizer: PreTrainedTokenizerFast) -> None:
    record = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    assert "textwrap.py" in record["held_out_modules"]
    source = Path(sysconfig.get_paths()["stdlib"], "textwrap.py").read_text(encoding="utf-8")
    num_windows = 2048 // CONTEXT
    token_ids = torch.tensor(tokenizer(source).input_ids[: num_windows * CONTEXT]).view(num_windows, CONTEXT)

    model, loading = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    loss = model(input_ids=token_ids, labels=token_ids).loss.item()

    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.num_parameters() == record["num_parameters"]
    assert math.exp(loss) < record["unigram_perplexity"] / 3


@pytest.mark.parametrize(
    "text", ["", "量化后的模型应当保持精度。", "naïve café — 🦙\t\r\n", " def f(x):\n        return x\n"]
)
def test_tokenizer_round_trips_unicode(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_opens_the_assistant_turn_and_adds_no_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "你好"}]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt_ids) == "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.bos_token_id not in prompt_ids
