"""Peak memory does not follow the number of blocks or of samples. Each measurement runs in a process of its own, small
case first: what a process once needed stays on record, so that what is measured is how much the large case adds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A block is 2.6 MB in float32, a batch of hidden states 4 MB: the 50 MB that the large cases have more would show.
FIELDS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
SUSPENDED_BYTES = 16 << 20
SLACK_BYTES = 12 << 20

SCRIPT = f"""
import resource, shutil, sys
from pathlib import Path
import numpy as np
import torch
from quantpipe.formats.scheme import w4a16
from quantpipe.quantize.activation_coverage import measure_activations
from quantpipe.quantize.loop import block_solving
from quantpipe.quantize.targets.discover import find_targets
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.targets.sensitivity import measure_sensitivity
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.report import no_progress

what, work = sys.argv[1], Path(sys.argv[2])
block_solving.MAX_SUSPENDED_BYTES = {SUSPENDED_BYTES}
torch.set_num_threads(1)

def peak(folder, num_sequences):
    work.mkdir()
    model = StreamedModel.open(Path(folder))
    targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(64))
    token_ids = np.random.default_rng(0).integers(3, 128, (num_sequences, 128))
    if what == "observe":
        measure_activations(model, token_ids, None, {{"held out": token_ids}}, work / "own", no_progress)
    elif what != "sensitivity":
        method = Method([], solve_gptq, reads_data=True)
        apart = np.tile(np.arange(32), (num_sequences, 4)) if what == "quantize apart" else None
        quantize_blocks(model, targets, method, token_ids, work, "fingerprint", no_progress, apart)
    else:
        measure_sensitivity(model, targets.schemes, token_ids, work, no_progress)
    shutil.rmtree(work)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

cases = [case.split(":") for case in sys.argv[3:]]
peaks = [peak(folder, int(num_sequences)) for folder, num_sequences in cases]
print(peaks[2] - peaks[1])
"""


def added_bytes(what: str, work: Path, small: tuple[Path, int], large: tuple[Path, int]) -> int:
    """How much more memory the large case needs than the small one, which runs twice to warm up."""
    cases = [f"{folder}:{num_sequences}" for folder, num_sequences in (small, small, large)]
    command = [sys.executable, "-c", SCRIPT, what, str(work / "work"), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("what", ["quantize", "sensitivity"])
def test_peak_memory_does_not_grow_with_the_number_of_blocks(
    random_llama: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    num_sequences = 32 if what == "quantize" else 2
    few, many = (random_llama(**FIELDS, num_hidden_layers=count) for count in (2, 20))
    # eighteen blocks more are 47 MB in float32
    assert added_bytes(what, tmp_path, (few, num_sequences), (many, num_sequences)) < SLACK_BYTES


@pytest.mark.parametrize("what", ["quantize", "quantize apart", "observe"])
def test_peak_memory_does_not_grow_with_the_number_of_samples(
    random_llama: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    folder = random_llama(**FIELDS, num_hidden_layers=1)
    # four batches are enough to have some waiting; the hidden states of the larger set are 50 MB more, and where
    # documents are packed apart its masks and ropes another 30 MB
    assert added_bytes(what, tmp_path, (folder, 128), (folder, 512)) < SLACK_BYTES
