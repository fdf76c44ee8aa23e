"""How byte-level BPE vocabularies cut a text into words before merging, by the name in `tokenizer.ggml.pre`.

The name stands for the regular expressions of the model's own tokenizer.json: the text is cut by the first, the parts
by the second, and so on; what no expression matches stays a part of its own. Unicode classes, case folding and
possessive quantifiers are those of the library's regex engine, which the models were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _TAIL
_QWEN2 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _TAIL
_QWEN35 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
)
_SEED_CODER = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+" + _TAIL
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

# Words in one case: capitals then small letters, or capitals alone. With and without contractions at the end.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_O200K = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?|{_LEAD}{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL

# Code points in hex: the text of some of these letters does not survive an editor that normalises Unicode.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)


def _characters(ranges: str) -> str:
    """`41-5A B5` as the inside of a character class: `A-Zµ`."""
    return "".join("-".join(chr(int(end, 16)) for end in span.split("-")) for span in ranges.split(" "))


_HAN_TO_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_characters(_CASED_LETTERS)}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _HAN_TO_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _TAIL,
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DIGITS_APART = (r"\p{N}", _GPT2)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The cutting rules of one name and what goes with them."""

    patterns: tuple[str, ...]
    adds_bos: bool = False  # unless the file says otherwise
    ignores_merges: bool = False  # a word that is in the vocabulary is its token, whatever the merges make of it
    is_composed: bool = False  # Unicode NFC first

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rules as a pre-tokenizer of the library, ending in the byte-level alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.is_composed else None


def _rules() -> list[tuple[str, PreTokenizer]]:
    """(names separated by spaces, rules)."""
    return [
        ("default", PreTokenizer(_DEFAULT)),
        (
            "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
            "jina-es jina-de jina-v2-es jina-v2-de",
            PreTokenizer((_GPT2,)),
        ),
        ("smollm starcoder refact codeshell exaone minerva-7b", PreTokenizer(_DIGITS_APART)),
        ("command-r", PreTokenizer(_DIGITS_APART, is_composed=True)),
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            PreTokenizer((_LLAMA3,), adds_bos=True, ignores_merges=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen kormo megrez f2llmv2", PreTokenizer((_QWEN2,), is_composed=True)),
        ("stablelm2 hunyuan grok-2", PreTokenizer((_QWEN2,))),
        ("qwen35", PreTokenizer((_QWEN35,), is_composed=True)),
        ("tekken", PreTokenizer((_TEKKEN,), adds_bos=True, ignores_merges=True)),
        ("gpt-4o llama4 minimax-m2 kanana2 talkie", PreTokenizer((_O200K,))),
        ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
        ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
        ("deepseek-v3 hunyuan-dense", PreTokenizer(_DEEPSEEK_V3)),
        ("falcon", PreTokenizer(_FALCON)),
        ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
        ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
        ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
        ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ]


def by_name(name: str) -> PreTokenizer | None:
    """The rules that go by `name` in GGUF files; None for a name that is not known."""
    return next((rules for names, rules in _rules() if name in names.split(" ")), None)


def known_names() -> list[str]:
    return [name for names, _ in _rules() for name in names.split(" ")]
