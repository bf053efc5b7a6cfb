"""Bytes of weights equal those of real folders, on disk and as the engine holds them."""

import math
from pathlib import Path

import pytest
from planned import LLAMA2_70B, LLAMA_8B, MIXTRAL, shape_in

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.dtypes import DTYPE_BYTES
from quantpipe.formats.scheme import w4a16, w8a8, weight_only
from quantpipe.plan import weights
from quantpipe.plan.subject import read_subject

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_stored_bytes_are_those_of_the_file_but_for_declared_shapes(name: str) -> None:
    stored = Artifact.open(GOLDEN / name).stored
    in_file = sum(math.prod(own.spec.shape) * DTYPE_BYTES[own.spec.dtype] for own in stored.values())
    declared = sum(16 for tensor in stored if tensor.endswith("weight_shape"))
    shape = read_subject(GOLDEN / name, (), None, GOLDEN).shape
    assert weights.stored_bytes(shape) == in_file - declared


@pytest.mark.parametrize(("name", "error_frac"), [("w8a8", 0.05), ("w4a16", 0.1)])
def test_held_bytes_are_what_the_engine_holds_but_for_the_padding_of_tiny_matrices(
    name: str, error_frac: float
) -> None:
    engine = Engine.open(GOLDEN / name, EngineConfig(num_threads=1, max_model_len=32, max_num_seqs=1))
    shape = read_subject(GOLDEN / name, (), None, GOLDEN).shape
    assert weights.held_bytes(shape, "cpu") == pytest.approx(engine.memory.weight_bytes, rel=error_frac)


def test_llama_2_70b_has_69_billion_weights_in_138_gb(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA2_70B)
    assert shape.num_weights == 68_976_648_192
    assert weights.stored_bytes(shape) == 2 * shape.num_weights


def test_schemes_take_their_bits_and_leave_embedding_and_head(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    inner = sum(linear.num_weights for linear in shape.linears)
    tables = 2 * 2 * shape.vocab_size * shape.hidden_size + 2 * shape.num_norm_weights
    for scheme, bits in ((w4a16(64), 4.25), (w4a16(128), 4.125), (weight_only(3, 64), 3.25)):
        assert weights.stored_bytes(shape.in_scheme(scheme)) == inner * bits / 8 + tables
    rows = sum(linear.out_features for linear in shape.linears)
    assert weights.stored_bytes(shape.in_scheme(w8a8())) == inner + 2 * rows + tables


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    apart = shape_in(tmp_path, LLAMA_8B)
    tied = shape_in(tmp_path, LLAMA_8B | {"tie_word_embeddings": True})
    table = 2 * apart.vocab_size * apart.hidden_size
    assert weights.stored_bytes(apart) - weights.stored_bytes(tied) == table
    assert weights.held_bytes(apart, "gpu") - weights.held_bytes(tied, "gpu") == table


def test_three_bits_take_the_room_of_four_in_a_cpus_memory(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    three, four = shape.in_scheme(weight_only(3, 64)), shape.in_scheme(w4a16(64))
    assert weights.held_bytes(three, "cpu") == weights.held_bytes(four, "cpu")
    assert weights.held_bytes(three, "gpu") < weights.held_bytes(four, "gpu")


def test_one_token_reads_two_of_eight_experts_and_many_read_all(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, MIXTRAL)
    experts = sum(own.num_weights for own in shape.linears if own.num_copies > 1)
    rest = sum(own.num_weights for own in (*shape.linears, shape.lm_head) if own.num_copies == 1)
    assert weights.read_bytes(shape, "gpu", 1) == pytest.approx(2 * (experts / 4 + rest))
    assert weights.read_bytes(shape, "gpu", 512) == pytest.approx(2 * (experts + rest))
