"""What int8 activations and 16-bit K and V cost in quality: `python -m bench.perplexity [--tokens 16000] [--model FILE]
[--kv-type auto]`.

Perplexity of one fixed text (Python's own help topics) under the model as it is served, and under the same weights
dequantised to float32 and computed in float32; their ratio beside the target, within 0.5 %.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import torch

from pyserve.app import model_path
from pyserve.kv_store import KV_TYPES
from pyserve.models.gguf import read_gguf
from pyserve.settings import Settings
from pyserve.text.tokenizer import from_gguf
from tests.models.running import MAX_TOKENS, Running

WINDOW = 512  # tokens that see each other


def write_float32(model: Path, path: Path) -> Path:
    """The same model with its matrices dequantised."""
    source = read_gguf(model)
    writer = gguf.GGUFWriter(path, str(source.metadata["general.architecture"]))
    for key, value in source.metadata.items():
        if not key.startswith(("GGUF.", "general.architecture", "general.file_type")):
            _add(writer, key, value)
    for name, tensor in source.tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.type]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = tensor.raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)
        writer.add_tensor(name, gguf.quants.dequantize(rows, kind).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
    adder = writer.add_array if isinstance(value, list) else adders[type(value)]
    adder(key, value)


def losses(model: Path, tokens: list[int], kv_type: str) -> torch.Tensor:
    """Negative log-likelihood of each token, window by window, the first of each left out."""
    found = []
    running = Running(model, max_positions=WINDOW, kv_type=kv_type)
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        running.position = 0
        chunks = [window[at : at + MAX_TOKENS] for at in range(0, len(window), MAX_TOKENS)]
        logits = torch.cat([running.step(chunk) for chunk in chunks])  # [tokens, vocab]
        wanted = torch.tensor(window[1:])
        found.append(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="none"))
    return torch.cat(found).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--kv-type", choices=("auto", *KV_TYPES), default="auto")
    chosen = parser.parse_args()
    model = chosen.model or model_path(Settings())
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = from_gguf(read_gguf(model).metadata).encode(text)[: chosen.tokens]
    with tempfile.TemporaryDirectory() as folder:
        exact = losses(write_float32(model, Path(folder) / "float32.gguf"), tokens, "f32")
    served = losses(model, tokens, chosen.kv_type)
    # Of 4000 tokens, rounding alone moves the result by some 0.15 %: what costs 0.03 % cannot be told from luck there.
    change = math.expm1(float((served - exact).mean())) * 100
    error = 100 * float((served - exact).std()) / len(served) ** 0.5
    before, after = math.exp(exact.mean()), math.exp(served.mean())
    print(f"{len(tokens)} tokens: perplexity {before:.3f} in float32, {after:.3f} as served: "
          f"{change:+.2f} % +- {error:.2f} (target: within 0.5 %)")  # fmt: skip


if __name__ == "__main__":
    main()
