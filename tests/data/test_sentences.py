from __future__ import annotations

import pytest

from narrowboat.data.sentences import sentence_ends


def sentences(text: str) -> list[str]:
    ends = sentence_ends(text)
    return [text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("The sample weighed 3.25 g and cost 1.80 EUR.", 1),
        ("Lee et al. [2019] measured it. It rose.", 2),
        ("Her temperature was 98.6 in the morning. It fell.", 2),
        ("Fig. 3 shows it. See e.g. Table 2. Dr. Who knows v1.2.3 from https://a.b/c.d?e=f. Yes.", 4),
        ("Art. 5 Abs. 2 applies. Sect. 3.1 holds, cf. No. 7.", 2),
        ('"Stop!" he said. "Why?" she asked.', 2),
        ("1. First item. 2. Second item.", 2),
        ("Wait... what? No.", 2),
    ],
)
def test_r04_decimals_and_abbreviations_are_no_ends(text, num):
    assert len(sentences(text)) == num


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("他走了。真的吗？是的！好。", ["他走了。", "真的吗？", "是的！", "好。"]),
        ("他说。abc. Def 98.6。好", ["他说。", "abc.", "Def 98.6。", "好"]),
        ("彼は「はい。」と言った。そうですか？", ["彼は「はい。」と言った。", "そうですか？"]),
        ("他说：“你好。”然后走了。", ["他说：“你好。”", "然后走了。"]),
    ],
)
def test_r04_chinese_and_japanese_need_no_blank(text, expected):
    assert sentences(text) == expected


def test_nothing_is_lost():
    text = "  A b.  C d!\n\n\n E.\tF\n"
    assert "".join(text[a:b] for a, b in zip([0, *sentence_ends(text)], sentence_ends(text), strict=False)) == text
    assert sentence_ends("") == []
