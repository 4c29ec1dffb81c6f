"""The table of `docs/openai-conformance.md` that says what becomes of every field.
`python -m tests.router.openai.field_page` writes it anew.
"""

from pathlib import Path

from router.http.known_fields import FIELDS, Api, KnownField

PAGE = Path(__file__).parents[3] / "docs/openai-conformance.md"
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"

COLUMNS = {
    "chat": Api.CHAT,
    "completions": Api.COMPLETIONS,
    "responses": Api.RESPONSES,
    "messages": Api.MESSAGES,
    "count": Api.COUNT_TOKENS,
    "tokenize": Api.TOKENIZE,
    "detokenize": Api.DETOKENIZE,
}


def table() -> str:
    """A row per field, by name."""
    head = ["field", *COLUMNS, "what is not served, and why"]
    rows = [head, ["---"] * len(head), *(_row(name) for name in sorted(FIELDS))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str) -> list[str]:
    known = FIELDS[name]
    return [f"`{name}`", *(_fate(known, api) for api in COLUMNS.values()), _why(known)]


def _fate(known: KnownField, api: Api) -> str:
    if api in known.obeyed:
        return "in part" if known.limits else "yes"
    return "ignored" if api in known.idle else "400"


def _why(known: KnownField) -> str:
    if known.limits:
        return f"not: {known.limits}"
    is_refused = any(_fate(known, api) == "400" for api in COLUMNS.values())
    return known.refusal if is_refused else ""


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
