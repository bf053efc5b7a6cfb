"""The formula of a quantization run meets the measured runs that it was made from, roughly."""

from pathlib import Path
from typing import Any

import pytest
from planned import write_config

from quantpipe.plan.quantization_run import START_S, QuantizationRun, quantization_run
from quantpipe.plan.subject import read_subject

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def run_of(folder: Path, config: dict[str, Any], quantize: str, num_sequences: int) -> QuantizationRun:
    (folder / "rows.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    keys = f"{{set: {{sources: [{{path: rows.jsonl, fields: {{text: text}}}}]}}, num_sequences: {num_sequences}}}"
    calibration = f"calibration: {keys}\n" if num_sequences else ""
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nname: some\nmodel: ./base\noutput: out\n{calibration}quantize: {quantize}\n",
        encoding="utf-8",
    )
    (folder / "base").mkdir(exist_ok=True)
    subject = read_subject(path, (), write_config(folder, config), folder)
    assert subject.recipe is not None
    return quantization_run(subject.base, subject.shape, subject.recipe)


# Processor seconds, peak GB and MB on disk of bench/README.md.
@pytest.mark.parametrize(
    ("config", "num_sequences", "cpu_s", "peak_gb", "weights_mb"),
    [(SMOLLM2, 64, 346, 1.30, 113), (QWEN_05B, 16, 569, 3.36, 735)],
    ids=["SmolLM2-135M", "Qwen2.5-0.5B"],
)
def test_gptq_is_as_measured(
    tmp_path: Path, config: dict[str, Any], num_sequences: int, cpu_s: float, peak_gb: float, weights_mb: float
) -> None:
    run = run_of(tmp_path, config, "{solver: gptq, scheme: w4a16}", num_sequences)
    assert run.processor_time_s == pytest.approx(cpu_s, rel=0.1)
    assert run.peak_memory_bytes == pytest.approx(peak_gb * 1e9, rel=0.1)
    assert run.artifact_bytes == pytest.approx(weights_mb * 1e6, rel=0.02)
    assert run.disk_bytes > 2 * run.artifact_bytes


@pytest.mark.parametrize(
    ("quantize", "cpu_s"),
    [
        ("{transforms: [awq], solver: gptq, scheme: w4a16}", 437),
        ("{solver: {name: gptq, propagate: both}, scheme: w4a16}", 535),
        ("{transforms: [smoothquant], solver: gptq, scheme: w8a8}", 620),
        ("{transforms: [smoothquant], solver: rtn, scheme: w8a8}", 433),
        ("{transforms: [awq], solver: rtn, scheme: w4a16}", 339),
        ("{transforms: [rotate], solver: gptq, scheme: w4a16}", 289),
        ("{solver: {name: rtn, scales: hessian}, scheme: w4a16}", 330),
        ("{solver: gptq, scheme: w3a16}", 235),
    ],
)
def test_other_methods_are_within_a_factor_of_one_and_a_half(tmp_path: Path, quantize: str, cpu_s: float) -> None:
    assert 1 / 1.5 < run_of(tmp_path, SMOLLM2, quantize, 64).processor_time_s / cpu_s < 1.5


def test_plain_rounding_reads_no_texts(tmp_path: Path) -> None:
    assert run_of(tmp_path, SMOLLM2, "{solver: rtn, scheme: w4a16}", 0).processor_time_s == START_S
