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

_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN_TO_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
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
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer(_DIGITS_APART)),
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreTokenizer((_LLAMA3,), adds_bos=True, ignores_merges=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen kormo megrez", PreTokenizer((_QWEN2,), is_composed=True)),
        ("stablelm2 hunyuan grok-2", PreTokenizer((_QWEN2,))),
        ("qwen35", PreTokenizer((_QWEN35,), is_composed=True)),
        ("tekken", PreTokenizer((_TEKKEN,), adds_bos=True, ignores_merges=True)),
        ("gpt-4o llama4 minimax-m2", PreTokenizer((_O200K,))),
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
