"""Tokenizers of Hugging Face folders, against AutoTokenizer on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline
from transformers import AutoTokenizer

from pyserve.errors import ModelFileError
from pyserve.text.chat import source_in_folder
from pyserve.text.tokenizer import from_folder
from tests.text.vocabularies import HURTING, byte_level, merges_of, sentencepiece, sentencepiece_merges, vocab_of

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_folder(path: Path, **config: object) -> Path:
    """A folder like Qwen's. BOS goes before a text by tokenizer.json's post-processor."""
    metadata = byte_level()
    pipeline = Pipeline(models.BPE(vocab=vocab_of(metadata), merges=merges_of(metadata)))
    pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(CONTROL)
    pipeline.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    pipeline.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    return saved(
        path,
        pipeline,
        {"bos_token": "<|im_start|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, **config},
    )


def sentencepiece_folder(path: Path) -> Path:
    """A folder like Llama 2's."""
    metadata = sentencepiece()
    model = models.BPE(
        vocab=vocab_of(metadata), merges=sentencepiece_merges(), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    pipeline = Pipeline(model)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens(["<unk>", "<s>", "</s>"])
    pipeline.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return saved(path, pipeline, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def saved(path: Path, pipeline: Pipeline, config: dict[str, object]) -> Path:
    pipeline.save(str(path / "tokenizer.json"))
    write(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("make", [byte_level_folder, sentencepiece_folder])
def test_ids_and_texts_are_those_of_transformers(make: type, tmp_path: Path) -> None:
    folder = make(tmp_path)
    ours, theirs = from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*HURTING, "<|im_start|>a<think><|im_end|></s> b"]:
        for add_special in (False, True):
            ids = ours.encode(text, add_special=add_special)
            assert ids == theirs.encode(text, add_special_tokens=add_special), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.vocab_size == len(theirs)


def test_roles_come_from_the_configs(tmp_path: Path) -> None:
    tokenizer = from_folder(byte_level_folder(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.adds_bos and not tokenizer.adds_eos
    assert tokenizer.eog_ids == {0, 2}


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    write(tmp_path / "tokenizer_config.json", {})
    write(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
    assert from_folder(tmp_path).eos_id == 2


@pytest.mark.parametrize(("value", "ends"), [(7, {0, 2, 7}), ([8, 9], {0, 2, 8, 9})])
def test_generation_config_names_further_ends(value: object, ends: set[int], tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    write(tmp_path / "generation_config.json", {"eos_token_id": value})
    write(tmp_path / "config.json", {"eos_token_id": 11})
    assert from_folder(tmp_path).eog_ids == ends


def test_control_tokens_in_plain_text_stay_text(tmp_path: Path) -> None:
    tokenizer = from_folder(byte_level_folder(tmp_path))
    plain = tokenizer.encode("a<|im_end|><think>", parse_special=False)
    assert not set(plain) & {0, 1, 2}
    assert plain[-1] == tokenizer.encode("<think>")[0]
    assert tokenizer.decode(plain) == "a<|im_end|><think>"
    assert tokenizer.encode("a<|im_end|>")[-1] == 2


def test_both_ways_of_parsing_at_once_do_not_mix(tmp_path: Path) -> None:
    tokenizer = from_folder(byte_level_folder(tmp_path))
    text = "a<|im_end|>b" * 200
    expected = {flag: tokenizer.encode(text, parse_special=flag) for flag in (False, True)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(50) if tokenizer.encode(text, parse_special=flag) != expected[flag])

    threads = [Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    size = from_folder(byte_level_folder(tmp_path)).vocab_size
    extra = {"content": "<|extra|>", "special": True, "normalized": False}
    byte_level_folder(tmp_path, added_tokens_decoder={"0": {"content": "<|endoftext|>"}, str(size): extra})
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("<|extra|>") == [size]
    byte_level_folder(tmp_path, added_tokens_decoder={str(size + 5): extra})
    with pytest.raises(ModelFileError, match="cannot have the id"):
        from_folder(tmp_path)


def test_limits_of_a_training_run_are_ignored(tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    pipeline = Pipeline.from_file(str(tmp_path / "tokenizer.json"))
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert len(from_folder(tmp_path).encode("one two three four five six seven eight nine")) not in (4, 64)


def test_broken_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ModelFileError) as error:
            from_folder(tmp_path)
        assert "\n" not in error.value.message
        return error.value.message

    assert "tokenizer.json is missing" in refusal()
    (tmp_path / "tokenizer.json").write_text("{ not json", encoding="utf-8")
    assert "tokenizer.json cannot be read" in refusal()
    byte_level_folder(tmp_path, eos_token="<nowhere>")
    assert "eos_token '<nowhere>' is not in the vocabulary" in refusal()
    byte_level_folder(tmp_path)
    write(tmp_path / "generation_config.json", {"eos_token_id": 10**6})
    assert "generation_config.json: eos_token_id 1000000" in refusal()
    (tmp_path / "generation_config.json").write_text("[]", encoding="utf-8")
    assert "generation_config.json does not hold an object" in refusal()
    pipeline = Pipeline(models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "generation_config.json").unlink()
    saved(tmp_path, pipeline, {})
    assert "decoder [] is not supported" in refusal()


def test_where_the_chat_template_of_a_folder_is_found(tmp_path: Path) -> None:
    assert source_in_folder(tmp_path) is None
    write(tmp_path / "tokenizer_config.json", {"chat_template": "one"})
    assert source_in_folder(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert source_in_folder(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four", encoding="utf-8")
    assert source_in_folder(tmp_path) == "four"
