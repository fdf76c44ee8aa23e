"""A vocabulary from a Hugging Face folder: tokenizer.json and the files around it.

tokenizer.json holds the whole pipeline, and its post-processor alone decides what `add_special` adds. From
tokenizer_config.json or special_tokens_map.json come the BOS and EOS texts, from `added_tokens_decoder` tokens that
tokenizer.json lacks, and from generation_config.json (or else config.json) further ids that end an answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from pyserve.errors import ModelFileError
from pyserve.text import pieces
from pyserve.text.pieces import Kind, Pieces, Vocabulary


def read(folder: Path) -> Vocabulary:
    """The vocabulary of the model in `folder`. Raises ModelFileError naming the file at fault."""
    pipeline = _pipeline(folder)
    config = read_json(folder / "tokenizer_config.json")
    special = {**read_json(folder / "special_tokens_map.json"), **config}
    _add_missing_tokens(pipeline, config)
    tokens, strips_space = _pieces(pipeline, folder)
    bos_id = _role(pipeline, special, "bos_token")
    eos_id = _role(pipeline, special, "eos_token")
    ends = _named_ends(folder, len(tokens.texts))
    encoder = _PipelineEncoder(pipeline)
    plain = encoder.encode("a", add_special=False, parse_special=True)
    dressed = encoder.encode("a", add_special=True, parse_special=True)
    is_longer = len(dressed) > len(plain)
    return Vocabulary(
        tokens,
        encoder,
        bos_id=bos_id,
        eos_id=eos_id if eos_id is not None or not ends else ends[0],
        eog_ids=pieces.end_tokens(tokens, [eos_id, *ends]),
        adds_bos=is_longer and dressed[0] == bos_id,
        adds_eos=is_longer and dressed[-1] == eos_id,
        strips_leading_space=strips_space,
    )


class _PipelineEncoder:
    """The library's pipeline with a switch for special tokens.

    The switch is a setting of the pipeline and not of a call, so calls take turns. A second pipeline would spare the
    lock and cost the memory of another vocabulary.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        with self._lock:
            self._pipeline.encode_special_tokens = not parse_special
            # The batch call is twice as fast as `encode`, which also works out offsets.
            return list(self._pipeline.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)


def _pipeline(folder: Path) -> Pipeline:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{path} is missing")
    try:
        pipeline = Pipeline.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    pipeline.no_truncation()  # tokenizer.json may carry the limits of a training run
    pipeline.no_padding()
    return pipeline


def _add_missing_tokens(pipeline: Pipeline, config: dict[str, object]) -> None:
    """Tokens of `added_tokens_decoder` that tokenizer.json lacks, in the order of their ids."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key in sorted((key for key in entries if key.isdigit()), key=int):
        entry = entries[key]
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or pipeline.token_to_id(content) is not None:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        pipeline.add_tokens([AddedToken(content, normalized=bool(entry.get("normalized", True)), **flags)])
        if pipeline.token_to_id(content) != int(key):
            raise ModelFileError(f"tokenizer_config.json: added_tokens_decoder: {content!r} cannot have the id {key}")


def _pieces(pipeline: Pipeline, folder: Path) -> tuple[Pieces, bool]:
    """The pieces by id (ids without a token are unused) and whether decoding strips a leading space."""
    steps = list(_decoder_steps(pipeline))
    names = {step.get("type") for step in steps}
    vocab = pipeline.get_vocab(with_added_tokens=True)
    texts = [""] * (max(vocab.values(), default=-1) + 1)
    kinds: list[int] = [Kind.UNUSED] * len(texts)
    for text, token in vocab.items():
        is_byte = "ByteFallback" in names and pieces.byte_value(text) is not None
        texts[token], kinds[token] = text, Kind.BYTE if is_byte else Kind.NORMAL
    for token, added in pipeline.get_added_tokens_decoder().items():
        kinds[token] = Kind.CONTROL if added.special else Kind.USER_DEFINED
    if "ByteLevel" in names:
        return Pieces(texts, kinds, pieces.byte_level_data(texts, kinds)), False
    if names & {"ByteFallback", "Metaspace", "Replace"}:
        return Pieces(texts, kinds, pieces.sentencepiece_data(texts, kinds)), any(map(_strips_space, steps))
    raise ModelFileError(f"{folder / 'tokenizer.json'}: decoder {sorted(map(str, names))} is not supported")


def _decoder_steps(pipeline: Pipeline) -> Iterator[dict[str, object]]:
    """The settings of the decoder's steps, a single one or the parts of a sequence."""
    decoder = pipeline.decoder
    if decoder is None:
        return
    settings = json.loads(decoder.__getstate__())
    yield from settings.get("decoders", [settings])


def _strips_space(step: dict[str, object]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and bool(step.get("start"))


def _role(pipeline: Pipeline, special: dict[str, object], name: str) -> int | None:
    """The id of the token that `name` (bos_token, eos_token) is set to: a text or an object with `content`."""
    value = special.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    token = pipeline.token_to_id(text) if isinstance(text, str) else None
    if token is None:
        raise ModelFileError(f"tokenizer_config.json: {name} {text!r} is not in the vocabulary")
    return int(token)


def _named_ends(folder: Path, vocab_size: int) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        named = value if isinstance(value, list) else [value]
        ends = [token for token in named if isinstance(token, int) and 0 <= token < vocab_size]
        if len(ends) < len(named):
            raise ModelFileError(f"{folder / name}: eos_token_id {value} is not among the {vocab_size} tokens")
        return ends
    return []


def read_json(path: Path) -> dict[str, object]:
    """The object in the file; empty if there is no file. Raises ModelFileError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold an object")
    return value
