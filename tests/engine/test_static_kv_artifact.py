"""From calibration to serving: scales that the quantizer measured are what the engine reads and verify watches."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.artifact_writer import write_artifact
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.quantize.kv_int8 import KVObserver
from quantpipe.quantize.model.block_runs import QUANTIZED, HiddenStates, StoredBatches, capture_block_inputs, run_block
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.watched_attention import watched_attention


@pytest.fixture(scope="module")
@torch.no_grad()
def artifact(random_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A random model, its weights left alone, with scales observed on random text; its manifest asks for them."""
    model = StreamedModel.open(random_llama(), attention=watched_attention())
    observer, num_layers = KVObserver("int8_static"), len(model.blocks.blocks)
    folders = [tmp_path_factory.mktemp("hidden") for _ in range(num_layers + 1)]
    token_ids_SL = np.random.default_rng(0).integers(3, 120, (4, 48))
    kwargs = capture_block_inputs(model, token_ids_SL, HiddenStates(folders[0]), [QUANTIZED])
    for index in range(num_layers):
        block = model.work_copy(model.load_block(index))
        with observer.observing(index):
            for number, batch in enumerate(StoredBatches(HiddenStates(folders[index]), kwargs, index)):
                HiddenStates(folders[index + 1]).write(number, {QUANTIZED: run_block(block, batch)})
    scales = observer.finish(num_layers).scales
    assert scales is not None
    target, sidecars = tmp_path_factory.mktemp("made") / "artifact", {KV_SCALES_NAME: scales.tensors()}
    return write_artifact(target, model.base, {}, None, {"kv_cache": "int8_static"}, sidecars=sidecars)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_engine_serves_the_mode_and_scales_of_the_artifact(artifact: Artifact, backend: str) -> None:
    prompts = [np.random.default_rng(seed).integers(3, 120, 40).tolist() for seed in range(3)]
    logits: dict[str | None, list[np.ndarray]] = {}
    for kv_dtype in (None, "auto"):
        rows: list[np.ndarray] = []
        engine = Engine.open(artifact.folder, EngineConfig(backend=backend, kv_dtype=kv_dtype, max_num_seqs=1))
        sinks = [lambda _first, rows_RV, rows=rows: rows.append(rows_RV.copy())] * len(prompts)
        engine.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), prompt_logits_sinks=sinks)
        assert engine.kv_dtype == (kv_dtype or "int8_static")
        logits[kv_dtype] = rows
    static, plain = (np.concatenate(logits[name]) for name in (None, "auto"))
    # Scales that cover new text of the same kind cost rounding only; wrong ones would clamp or flatten keys.
    assert 1e-5 < np.linalg.norm(static - plain) / np.linalg.norm(plain) < 0.02


def test_artifact_whose_scales_were_touched_is_noticed(artifact: Artifact, tmp_path: Path) -> None:
    assert verify(artifact.folder) == []
    path = artifact.folder / KV_SCALES_NAME
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        assert verify(artifact.folder) == [f"file {KV_SCALES_NAME} differs from its digest in the manifest"]
        path.unlink()
        with pytest.raises(ArtifactError, match=r"kv_scales\.safetensors: no such file"):
            Engine.open(artifact.folder)
    finally:
        path.write_bytes(content)
