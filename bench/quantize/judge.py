"""How far an artifact is from the full-precision model: one judge for every tool, independent of quantpipe.

transformers loads the base model and the compressed-tensors folder in float32 (quantized activations are simulated as
compressed-tensors does), both read each window of the test text whole, and their next-token distributions are compared
in float64. The base model's logits are kept in a file, as every artifact is held against them.

Shapes: W windows, L tokens per window, T = L - 1 positions that predict a token of the window, V vocabulary.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

ROWS_AT_ONCE = 64
Logits = npt.NDArray[np.float32]


def transformers_logits(folder: Path, token_ids_WL: npt.NDArray[np.int64]) -> Iterator[Tensor]:
    """Float32 logits [T, V] of each window."""
    options = {} if _is_symmetric(folder) else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    with redirect_stderr(StringIO()), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **options
        ).eval()
        for token_ids_L in token_ids_WL:
            ids_1L = torch.from_numpy(token_ids_L).unsqueeze(0)
            yield model(input_ids=ids_1L, use_cache=False).logits[0, :-1].float()


def _is_symmetric(folder: Path) -> bool:
    """Whether no weights have zero points: transformers reads packed ones only when told to dequantize."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    groups = config.get("quantization_config", {}).get("config_groups", {})
    return all(group["weights"]["symmetric"] for group in groups.values())


def engine_logits(folder: Path, token_ids_WL: npt.NDArray[np.int64], kv_dtype: str, threads: int) -> Iterator[Tensor]:
    """The same from quantpipe's engine: transformers has no KV cache in these modes to judge them with."""
    from quantpipe.engine.config import EngineConfig
    from quantpipe.engine.engine import Engine
    from quantpipe.engine.request import SamplingParams

    num_tokens = token_ids_WL.shape[1]
    engine = Engine.open(
        folder,
        EngineConfig(
            kv_dtype=kv_dtype,
            max_num_seqs=1,
            max_model_len=num_tokens + 1,
            max_num_batched_tokens=num_tokens,
            num_threads=threads,
        ),
    )
    for token_ids_L in token_ids_WL:
        rows: dict[int, Logits] = {}

        def keep(first: int, logits_RV: Logits, rows: dict[int, Logits] = rows) -> None:
            rows.update((first + offset, row.copy()) for offset, row in enumerate(logits_RV))

        params = SamplingParams(max_tokens=0, ignore_eos=True)
        engine.generate([tuple(token_ids_L.tolist())], params, prompt_logits_sinks=[keep])
        yield torch.from_numpy(np.stack([rows[position] for position in range(num_tokens - 1)]))


def base_logits(base: Path, token_ids_WL: npt.NDArray[np.int64], cache: Path) -> npt.NDArray[np.float32]:
    """The base model's logits [W, T, V], from ``cache`` if they were made before."""
    if not cache.is_file():
        partial = cache.with_suffix(".partial.npy")
        kept: np.memmap[tuple[int, ...], np.dtype[np.float32]] | None = None
        for index, logits_TV in enumerate(transformers_logits(base, token_ids_WL)):
            if kept is None:
                shape = (len(token_ids_WL), *logits_TV.shape)
                kept = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
            kept[index] = logits_TV.numpy()
        if kept is None:
            raise SystemExit("no windows to judge on")
        kept.flush()
        partial.replace(cache)
    loaded: npt.NDArray[np.float32] = np.load(cache, mmap_mode="r")
    return loaded


def compare(base_TV: Tensor, cand_TV: Tensor, next_ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(base || candidate) in nats, log-likelihood ratio (base - candidate) of the next token, and agreement."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(base_TV), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        base_RV = base_TV[rows].double().log_softmax(-1)
        cand_RV = cand_TV[rows].double().log_softmax(-1)
        kl_R = (base_RV.exp() * (base_RV - cand_RV)).sum(-1)
        ratio_R = (base_RV - cand_RV).gather(1, next_ids_T[rows].unsqueeze(1)).squeeze(1)
        parts.append((kl_R, ratio_R, base_TV[rows].argmax(-1) == cand_TV[rows].argmax(-1)))
    kl_T, ratio_T, agrees_T = (torch.cat(each) for each in zip(*parts, strict=True))
    return kl_T, ratio_T, agrees_T


def judge(base_WTV: Logits, candidate: Iterator[Tensor], token_ids_WL: npt.NDArray[np.int64]) -> dict[str, object]:
    """The figures of one row of the table."""
    found = []
    for base_TV, cand_TV, token_ids_L in zip(base_WTV, candidate, token_ids_WL, strict=True):
        if not bool(torch.isfinite(cand_TV).all()):
            raise SystemExit("the candidate's logits are not finite")
        found.append(compare(torch.from_numpy(np.array(base_TV)), cand_TV, torch.from_numpy(token_ids_L[1:])))
    kl_WT, ratio_WT, agrees_WT = (torch.stack(each) for each in zip(*found, strict=True))
    return {
        "mean_kl": float(kl_WT.mean()),
        "p99_kl": float(kl_WT.flatten().quantile(0.99)),
        "top1_agreement": float(agrees_WT.double().mean()),
        "perplexity_ratio": math.exp(float(ratio_WT.mean())),
        "mean_kl_W": [round(value, 6) for value in kl_WT.mean(1).tolist()],
        "num_positions": kl_WT.numel(),
    }


def base_perplexity(base_WTV: Logits, token_ids_WL: npt.NDArray[np.int64]) -> float:
    """Perplexity of the base model on the windows: what shows at a glance that the base itself is sound."""
    nll: list[Tensor] = []
    for base_TV, token_ids_L in zip(base_WTV, token_ids_WL, strict=True):
        log_probs_TV = torch.from_numpy(np.array(base_TV)).log_softmax(-1)
        nll.append(-log_probs_TV.gather(1, torch.from_numpy(token_ids_L[1:]).unsqueeze(1)))
    return math.exp(float(torch.cat(nll).double().mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True, help="int64 token ids [W, L] as .npy")
    parser.add_argument("--base-logits", type=Path, required=True, help="file that keeps the base model's logits")
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--kv-dtype", help="judge through quantpipe's engine, with this KV cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    token_ids_WL = np.load(args.windows)
    base_WTV = base_logits(args.base, token_ids_WL, args.base_logits)
    candidate: Callable[[], Iterator[Tensor]] = lambda: transformers_logits(args.artifact, token_ids_WL)  # noqa: E731
    if args.kv_dtype:
        candidate = lambda: engine_logits(args.artifact, token_ids_WL, args.kv_dtype, args.threads)  # noqa: E731
    figures = judge(base_WTV, candidate(), token_ids_WL)
    figures["base_perplexity"] = base_perplexity(base_WTV, token_ids_WL)
    args.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
