from pathlib import Path

from narrowboat.options.reference import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_reference_page_is_the_schema() -> None:
    """The frozen list of options: a change of name, type, default or sentence is a change of this page."""
    written = PAGE.read_text(encoding="utf-8")
    assert written == reference_page(), "run: python -m narrowboat.options.reference > docs/options.md"
